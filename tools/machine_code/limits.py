"""setmaxnreg (USETMAXREG): on no path may an instruction name a register above its warp's limit.

Not checked: reads, after the limit was raised again, of values that a lower limit released. A function that changes the limit is an error.
"""

import re

from . import flow
from .listing import spans

CHANGE = re.compile(r"(?:(UP\d+), )?(0x[0-9a-f]+)$")


def check(kernel):
    """Returns (errors, the highest register count used under each limit). The initial limit is the launch's number of registers."""
    errors = list(flow.unclear(kernel))
    used, beyond, reached = {}, {}, set()
    # A state is an instruction, the register limit, and, while the outcome of an attempt to change the limit is unknown, the attempt's
    # predicate and the limit if it fails.
    states = {(0, kernel.resources["registers"], None)}
    work = list(states)
    while work:
        index, limit, attempt = work.pop()
        reached.add(index)
        at = kernel.code[index]
        least = min(limit, attempt[1]) if attempt else limit
        most = max((first + count for first, count in spans(at.opcode, at.operands)), default=0)
        used[least] = max(used.get(least, 0), most)
        if most > least and (least not in beyond or at.address < beyond[least][0].address):
            beyond[least] = at, most
        for after in follow(kernel, index, limit, attempt):
            if after[0] == len(kernel.code):
                errors.append(f"control runs off the end of the code after {at}")
            elif after not in states:
                states.add(after)
                work.append(after)
    errors += [f"uses R{most - 1} where setmaxnreg leaves it {limit} registers: {at}" for limit, (at, most) in sorted(beyond.items())]
    errors += stray(kernel, reached)
    return errors, {limit: most for limit, most in sorted(used.items()) if most}


def stray(kernel, reached):
    """Yields an error for each kind of code that the path analysis from the kernel's entry does not cover."""
    for index, at in enumerate(kernel.code):
        if at.base == "USETMAXREG" and any(first <= index for first in kernel.functions):
            yield f"{at} may be in a function, where its callers' limit is not known"
    # The code ends with a BRA to itself and NOPs.
    lost = [at for index, at in enumerate(kernel.code) if index not in reached and at.base != "NOP" and at.targets != [index]]
    if lost:
        yield f"{len(lost)} instructions are on no path from the beginning; the first is {lost[0]}"


def follow(kernel, index, limit, attempt):
    """The states after an instruction."""
    at = kernel.code[index]
    if at.base == "USETMAXREG":
        predicate, value = CHANGE.search(at.operands).groups()
        # An attempt may fail; the warp then keeps its limit.
        before = min(limit, attempt[1]) if attempt else limit
        limit, attempt = int(value, 16), (predicate, before) if predicate else None
    elif attempt:
        attempt = watched(at, attempt)
    outcome = tested(at, attempt[0]) if attempt else None
    for target in flow.jumps(at):
        yield target, *settled(limit, attempt, outcome)
    if flow.falls(at):
        yield index + 1, *settled(limit, attempt, None if outcome is None else not outcome)


def settled(limit, attempt, outcome):
    """Returns the limit and the pending attempt after an outcome, which is None while it is unknown."""
    if outcome is None:
        return limit, attempt
    return (limit if outcome else attempt[1]), None


def watched(at, attempt):
    """The attempt after another instruction: PLOP3 copies its predicate; any other write to it leaves the outcome unknown, at the lower limit."""
    predicate, before = attempt
    if predicate is None:
        return attempt
    operands = at.operands.split(", ")
    if at.opcode == "PLOP3.LUT" and not at.guard and operands[1:] == ["PT", "PT", "PT", predicate, "0x80", "0x0"]:
        return operands[0], before
    if at.base not in flow.JUMPS and predicate in operands[:2]:
        return None, before
    return attempt


def tested(at, predicate):
    """For a branch on that predicate, whether the attempt succeeded if the branch is taken; otherwise None."""
    if at.base not in ("BRA", "JMP") or predicate is None:
        return None
    operand = at.operands.split(", ")[0] if "," in at.operands else ""
    conditions = [condition for condition in (at.guard, operand) if condition]
    if conditions in ([predicate], ["!" + predicate]):
        return conditions == [predicate]
    return None
