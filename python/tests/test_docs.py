"""Runs the unmodified Python example of docs/training.md under torchrun from the repository's root."""

import pathlib
import re

import torch
import torch.distributed as dist

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "training.md"


def the_ten_lines():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 1, f"{len(blocks)} blocks of Python"
    names = {}
    exec(compile(blocks[0], str(PAGE), "exec"), names)
    loss = names["loss"].item()
    # Training must reduce the loss to much less than ln 128, which is the loss if all outcomes get the same probability.
    assert 0 < loss < 4, loss
    router = names["model"].model.layers[0].mlp.gate.weight.grad
    assert router is not None and router.norm() > 0
    assert dist.is_initialized() and torch.isfinite(names["loss"])
    return f"loss {loss:.2f} per byte"
