"""The end of a program that used torch.distributed.

gloo's threads let go of a collective's tensors after they have said that it is done. Where a tensor had a Python object, that takes the
interpreter, and a thread that asks for it when the program has begun to end is ended in the middle of C++ code: the process aborts, and a job that
has done all its work fails (with torch 2.15 on a busy machine one job of four processes in 78; `destroy_process_group` does not help while
anything still holds a group, as FSDP does).
"""

import atexit
import pathlib
import time

# The name that torch gives them.
_GLOO = "pt_gloo_runloop"
_LOOK_EVERY_S = 0.002
# What waits for a collective that never comes sleeps; so this is for a machine that is busy beyond measure.
_LONGEST_S = 10.0


def _switches(status):
    """How often a thread has been given a CPU, by its `/proc` status; None where it has one or waits for one."""
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    asleep = fields["State"].startswith("S")
    return (fields["voluntary_ctxt_switches"], fields["nonvoluntary_ctxt_switches"]) if asleep else None


def _gloo_threads():
    """What each of gloo's threads has done, by its number."""
    seen = {}
    for task in pathlib.Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == _GLOO:
                seen[task.name] = _switches((task / "status").read_text())
        except OSError:  # The thread has ended.
            pass
    return seen


@atexit.register
def let_gloo_finish():
    """Waits until gloo's threads have nothing left to do: they sleep and have not run since the look before, while none needed the interpreter."""
    until, before = time.monotonic() + _LONGEST_S, None
    while time.monotonic() < until:
        now = _gloo_threads()
        if not now or (now == before and None not in now.values()):
            return
        before = now
        # Here a thread gets the interpreter.
        time.sleep(_LOOK_EVERY_S)
