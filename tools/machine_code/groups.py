"""Groups of HGMMA (wgmma): WARPGROUP.ARRIVE begins a group, the HGMMA with gsb0 closes it, WARPGROUP.DEPBAR.LE gsb0, N waits for it.

ptxas serialises wgmma if it cannot prove that no other instruction accesses the accumulators: each HGMMA is then a group, followed by a
wait and moves of accumulators. Checked on every path: a group has one HGMMA per step of a stage, contains no wait, and only HGMMA
accesses its accumulators until a wait for it.
Not checked: writes to the shared memory that a group reads, and waits of other warps.
"""

from . import flow
from .listing import spans

# A stage covers 64 of the K dimension; an HGMMA of 16-bit types covers 16.
STEPS = 4
# Maximum groups in flight; older ones are merged. Bounds the number of states for loops without a wait.
MAX_IN_FLIGHT = 8


def check(kernel):
    """Returns (errors, number of groups)."""
    errors, sizes = {}, {}
    sums = {spans(at.opcode, at.operands)[0] for at in kernel.code if at.base == "HGMMA"}
    # State: whether an ARRIVE is in effect, the open group's accumulators and size, and the accumulators of closed groups in flight, oldest first.
    states = {(0, False, (), 0, ())}
    work = list(states)
    while work:
        index, *state = work.pop()
        at = kernel.code[index]
        if at.base == "HGMMA":
            state = product(at, state, errors, sizes)
        elif at.base == "WARPGROUP":
            state = barrier(at, state, errors)
        elif state[0] or state[1] or state[3]:
            state = other(at, state, sums, errors)
        for after in flow.jumps(at) + ([index + 1] if flow.falls(at) else []):
            new = (after, *state)
            if after < len(kernel.code) and new not in states:
                states.add(new)
                work.append(new)
    for address, found in sorted(sizes.items()):
        for size in sorted(found - {STEPS}):
            errors.setdefault(address, f"the HGMMA at {address:#x} closes a group of {size}, not of {STEPS}")
    return [errors[address] for address in sorted(errors)], len(sizes)


def overlaps(one, other):
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]


def product(at, state, errors, sizes):
    armed, open_, size, closed = state
    own = spans(at.opcode, at.operands)[0]
    if not armed:
        errors.setdefault(at.address, f"{at} has no WARPGROUP.ARRIVE after what else touched its accumulators")
    flying = [span for group in (open_, *closed) for span in group]
    for span in spans(at.opcode, at.operands):
        # The next step of the same accumulators may follow at once.
        if any(overlaps(span, other) and other != own for other in flying) or span != own and overlaps(span, own):
            errors.setdefault(at.address, f"{at} touches accumulators in flight that are not its own")
    open_, size = tuple(sorted({*open_, own})), min(size + 1, 4 * STEPS)
    if at.operands.endswith("gsb0"):
        sizes.setdefault(at.address, set()).add(size)
        closed, open_, size = merged((*closed, open_)), (), 0
    return armed, open_, size, closed


def merged(closed):
    """Limits the groups in flight to MAX_IN_FLIGHT by merging the oldest ones."""
    while len(closed) > MAX_IN_FLIGHT:
        closed = (tuple(sorted({*closed[0], *closed[1]})), *closed[2:])
    return closed


def barrier(at, state, errors):
    armed, open_, size, closed = state
    if size:
        errors.setdefault(at.address, f"{at} is within a group, after {size} HGMMA")
        # Report the error once, not again at the end of the group.
        open_, size, closed = (), 0, (*closed, open_)
    if at.opcode == "WARPGROUP.ARRIVE":
        armed = True
    elif at.opcode.startswith("WARPGROUP.DEPBAR"):
        left = int(at.operands.split(", ")[-1], 16)
        closed = closed[len(closed) - left:] if left < len(closed) else closed
    return armed, open_, size, merged(closed)


def other(at, state, sums, errors):
    armed, open_, size, closed = state
    if at.base == "EXIT" and size:
        errors.setdefault(at.address, f"{at} is within a group, after {size} HGMMA")
    for span in spans(at.opcode, at.operands):
        if any(overlaps(span, own) for own in sums):
            armed = False
            if any(overlaps(span, flown) for group in (open_, *closed) for flown in group):
                errors.setdefault(at.address, f"{at} touches accumulators of an HGMMA in flight")
    return armed, open_, size, closed
