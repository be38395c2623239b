"""Makes programs that used torch.distributed exit cleanly.

gloo's threads release a collective's tensors after they have reported its completion. A thread needs the interpreter to release a tensor
that has a Python object. If a thread requests it while the interpreter shuts down, the thread is terminated in the middle of C++ code. The
process then aborts, and a job fails although it has finished its work. With torch 2.15 on a busy machine this happened to one of 78 jobs of
four processes. `destroy_process_group` joins these threads only if nothing else references their group.
"""

import atexit
import pathlib
import time

# The name that torch gives to gloo's threads.
_GLOO = "pt_gloo_runloop"
_POLL_S = 0.002
# The limit is reached only on a heavily loaded machine, because threads that wait for another process sleep and count as idle.
_LIMIT_S = 10.0


def _gloo_threads():
    """Returns for each gloo thread its number of context switches, or None if the thread is running or could run."""
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
    """Waits until gloo's threads are idle, which means that all sleep and none has run since the last check although the interpreter was
    free."""
    until, before = time.monotonic() + _LIMIT_S, None
    while time.monotonic() < until:
        now = _gloo_threads()
        if not now or (now == before and None not in now.values()):
            return
        before = now
        # Sleeping releases the interpreter, so that a thread that waits for it can take it.
        time.sleep(_POLL_S)
