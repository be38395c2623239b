"""Groups of HGMMA (wgmma): begun by WARPGROUP.ARRIVE, closed by the HGMMA that has gsb0, waited for by WARPGROUP.DEPBAR.LE gsb0, N.

ptxas serialises wgmma where it cannot prove that nobody touches the accumulators meanwhile: each HGMMA then is a group of its own, with a wait and
moves of accumulators after it. So on every path a group has as many HGMMAs as a stage has steps, nothing waits within one, and nothing but HGMMA
touches its accumulators until a wait for it.
Not seen: what writes the shared memory that a group reads; who else waits for it.
"""

from . import flow
from .listing import spans

# A stage is 64 of the sum; an HGMMA of 16-bit types takes 16 of it.
STEPS = 4
# Groups that may be in flight at once; more are taken as one. Bounds the states where nothing waits in a loop.
MOST = 8


def check(kernel):
    """(errors, how many groups there are)."""
    errors, sizes = {}, {}
    sums = {spans(at.opcode, at.operands)[0] for at in kernel.code if at.base == "HGMMA"}
    # Whether an ARRIVE is in force, the accumulators of the open group, its size, and those of closed groups in flight, the last closed one last.
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
        # The next step of the same sum may follow at once; nothing else of it.
        if any(overlaps(span, other) and other != own for other in flying) or span != own and overlaps(span, own):
            errors.setdefault(at.address, f"{at} touches accumulators in flight that are not its own")
    open_, size = tuple(sorted({*open_, own})), min(size + 1, 4 * STEPS)
    if at.operands.endswith("gsb0"):
        sizes.setdefault(at.address, set()).add(size)
        closed, open_, size = held((*closed, open_)), (), 0
    return armed, open_, size, closed


def held(closed):
    """No more than MOST groups: the earliest ones as one."""
    while len(closed) > MOST:
        closed = (tuple(sorted({*closed[0], *closed[1]})), *closed[2:])
    return closed


def barrier(at, state, errors):
    armed, open_, size, closed = state
    if size:
        errors.setdefault(at.address, f"{at} is within a group, after {size} HGMMA")
        # Not the same again at the end of it.
        open_, size, closed = (), 0, (*closed, open_)
    if at.opcode == "WARPGROUP.ARRIVE":
        armed = True
    elif at.opcode.startswith("WARPGROUP.DEPBAR"):
        left = int(at.operands.split(", ")[-1], 16)
        closed = closed[len(closed) - left:] if left < len(closed) else closed
    return armed, open_, size, held(closed)


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
