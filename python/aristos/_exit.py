"""The end of a program that used torch.distributed.

gloo's threads let go of a collective's tensors after they have said that it is done. Where a tensor had a Python object, that takes the
interpreter, and a thread that asks for it when the program has begun to end is ended in the middle of C++ code: the process aborts, and a job that
has done all its work fails (with torch 2.15 on a busy machine one job of four processes in 78). `destroy_process_group` joins these threads only
where nothing holds their group any more.
"""

import atexit
import pathlib
import time

# The name that torch gives them.
_GLOO = "pt_gloo_runloop"
_LOOK_EVERY_S = 0.002
# What waits for a collective that never comes sleeps; so this is for a machine that is busy beyond measure.
_LONGEST_S = 10.0


def _gloo_threads():
    """How often each of gloo's threads has been given a CPU, by its number; None where it has one or waits for one."""
    seen = {}
    for task in pathlib.Path("/proc/self/task").iterdir():
        try:
            status = (task / "status").read_text()
        except OSError:  # The thread has ended.
            continue
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        if fields["Name"] == _GLOO:
            switches = (fields["voluntary_ctxt_switches"], fields["nonvoluntary_ctxt_switches"])
            seen[task.name] = switches if fields["State"].startswith("S") else None
    return seen


@atexit.register
def let_gloo_finish():
    """Waits until gloo's threads have nothing left to do: they sleep, and have not run since the last look though the interpreter was free."""
    until, before = time.monotonic() + _LONGEST_S, None
    while time.monotonic() < until:
        now = _gloo_threads()
        if not now or (now == before and None not in now.values()):
            return
        before = now
        # Here a thread gets the interpreter.
        time.sleep(_LOOK_EVERY_S)
