"""What routers chose, kept for the simulator and the planner."""

import contextlib

_recorders = []


class Routing:
    """The choices of a training run, as `aristos sim routing` and `aristos plan` read them (docs/simulator.md).

    Attributes:
        steps: for each recorded step a list with, for each layer in the order of their passes, this process's [T, top_k] expert ids.
    """

    def __init__(self):
        self.steps = []
        self._open = None

    @contextlib.contextmanager
    def step(self):
        """Records the forward passes inside as one step."""
        self._open = []
        _recorders.append(self)
        try:
            yield
        finally:
            _recorders.remove(self)
            self.steps.append(self._open)
            self._open = None

    def add(self, ids):
        self._open.append(ids)


def record_routing():
    """A `Routing` to record steps with."""
    return Routing()


def note(ids):
    """Tells the open recorders of a pass."""
    if _recorders:
        for recorder in _recorders:
            recorder.add(ids.detach().cpu().clone())
