"""Records routing decisions for the planner and the simulator."""

import contextlib
import json
import os
from typing import Iterator

import torch

from . import _group, _metrics, _non_finite

_open = []


class Routing:
    """Records the routing of some steps of a training run and writes it to a routing file (docs/simulator.md)."""

    def __init__(self):
        self._steps = []

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Records the forward passes inside the context as step `number`. Each layer must have one forward pass."""
        with recording() as layers:
            try:
                yield
            finally:
                self._steps.append((number, layers))

    def write(self, path: str | os.PathLike, experts: int, group: _group.Group | None = None) -> None:
        """Writes the file that `aristos sim comms`, `aristos workload` and `aristos simulate` read with the option `--routing`. Collective;
        only rank 0 writes.

        Args:
            path: path of the file.
            experts: number of experts of each layer.
            group: the `Group` of the passes; the default has all processes.
        """
        group = group or _group.default()
        mine = [[ids.tolist() for ids in layers] for _, layers in self._steps]
        everyone = group.gather(mine)
        if group.rank:
            return
        records, top_k = [], None
        for index, (step, layers) in enumerate(self._steps):
            for layer, ids in enumerate(layers):
                top_k = ids.shape[1]
                rows = [theirs[index][layer] for theirs in everyone]
                choices = [expert for theirs in rows for token in theirs for expert in token]
                records.append(dict(layer=layer, step=step, tokens_per_node=[len(theirs) for theirs in rows], choices=choices))
        if not records:
            raise ValueError("no forward pass was recorded, expected one inside of step()")
        head = dict(version=1, experts=experts, top_k=top_k, nodes=group.size)
        with open(path, "w") as file:
            body = ",\n".join(json.dumps(record, separators=(",", ":")) for record in records)
            file.write(json.dumps(head)[:-1] + ', "records": [\n' + body + "\n]}\n")


@contextlib.contextmanager
def recording(with_dropped=False):
    """Yields a list that gets the ids of each forward pass of a layer inside the context. Choices beyond an expert's capacity are -1, unless
    `with_dropped`."""
    layers = []
    _open.append((layers, with_dropped))
    try:
        yield layers
    finally:
        # Not by `remove`, which compares tensors.
        _open[:] = [one for one in _open if one[0] is not layers]


def note(layer, group, ids, experts, kept=None):
    """Adds a forward pass of a layer, which has `experts` experts on `group`, to all open steps and to the metrics. `kept` are the ids with -1
    for each choice beyond the capacity, by default the same ids."""
    if torch.compiler.is_compiling():
        return
    _non_finite.begin(layer)
    if torch._C._current_graph_task_id() != -1:  # Activation checkpointing repeats the pass in a backward.
        return
    _metrics.count(layer, group, ids, experts, kept)
    for layers, with_dropped in _open:
        layers.append((ids if with_dropped or kept is None else kept).detach().cpu().clone())
