"""A clean exit of programs that used torch.distributed.

gloo's threads release a collective's tensors after they have reported its completion. Releasing a tensor with a Python object needs the
interpreter, and a thread that requests the interpreter during its shutdown is terminated in the middle of C++ code: the process aborts,
and a finished job fails (with torch 2.15 on a busy machine one of 78 jobs of four processes). `destroy_process_group` joins these threads
only if nothing else references their group.
"""

import atexit
import pathlib
import time

# Name of gloo's threads in torch.
_GLOO = "pt_gloo_runloop"
_POLL_S = 0.002
# Threads that wait for a missing collective sleep, so this limit is only reached on a heavily loaded machine.
_LIMIT_S = 10.0


def _gloo_threads():
    """Per gloo thread: its number of context switches, or None if it is running or runnable."""
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
def wait_for_gloo_threads():
    """Waits until gloo's threads are idle: all sleep, and none has run since the last check although the interpreter was free."""
    until, before = time.monotonic() + _LIMIT_S, None
    while time.monotonic() < until:
        now = _gloo_threads()
        if not now or (now == before and None not in now.values()):
            return
        before = now
        # Releases the interpreter, so that a waiting thread can take it.
        time.sleep(_POLL_S)
