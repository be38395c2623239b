"""Runs the Python examples of docs/training.md under torchrun from the repository's root: those for several processes unmodified, and that for
one GPU on an emulated device. Checks the type hints of the package."""

import inspect
import os
import pathlib
import re

import torch
import torch.distributed as dist

import aristos

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "training.md"


def blocks():
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(found) == 6, f"{len(found)} blocks of Python"
    return [compile(block, str(PAGE), "exec") for block in found], found


def the_ten_lines():
    names = {}
    exec(blocks()[0][0], names)
    loss = names["loss"].item()
    # Training must reduce the loss to much less than ln 128, which is the loss if all outcomes get the same probability.
    assert 0 < loss < 4, loss
    router = names["model"].model.layers[0].mlp.gate.weight.grad
    assert router is not None and router.norm() > 0
    assert dist.is_initialized() and torch.isfinite(names["loss"])
    return f"loss {loss:.2f} per byte"


def the_loop_with_data_parallelism():
    names = {}
    exec(blocks()[0][1], names)
    loss = names["loss"].detach().clone()
    dist.all_reduce(loss)
    loss = loss.item() / dist.get_world_size()
    # Equal probabilities give ln 256 = 5.5.
    assert loss < 4, loss
    norm = names["norm"].clone()
    dist.broadcast(norm, 0)
    assert norm == names["norm"] and norm > 0
    assert all(hasattr(parameter, "to_local") for parameter in names["model"].parameters())
    return f"loss {loss:.2f} per byte"


def the_loop_with_router_replay():
    lines = blocks()[1][2]
    # The first update sees the probabilities of the rollout, although the passes of the rollout had other shapes.
    names = {}
    exec(compile(lines.replace("range(20)", "range(1)").replace("range(2)", "range(1)"), str(PAGE), "exec"), names)
    assert (names["ratio"] - 1).abs().max() < 1e-5, names["ratio"]
    before = names["reward"].mean().item()
    exec(blocks()[0][2], names)
    reward = names["reward"].mean().item()
    assert reward > 0.75 and reward > before, (before, reward)
    return f"reward {before:.2f} to {reward:.2f}"


def the_routers_of_the_table():
    rows = re.findall(r"^\| [\w -]+ \| `(\w+=.*?)`", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 4, rows
    for options in rows:
        layer = aristos.MoE(8, 8, 16, **(dict(top_k=2) | eval(f"dict({options})")))
        (layer(torch.randn(1, 6, 8)).square().sum() + layer.aux_loss).backward()
        assert layer.gate.weight.grad.any() and layer.gate.weight.grad.isfinite().all(), options


class Writer:
    """The method of TensorBoard's writer that the page uses."""

    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.scalars[tag] = float(scalar_value), global_step


def the_lines_for_tensorboard():
    group, writer = aristos.init(), Writer()
    layer = aristos.MoE(8, 8, 4, 2, group=group)
    aristos.step_metrics()
    layer(torch.randn(6, 8)).sum().backward()
    exec(blocks()[0][5], dict(aristos=aristos, writer=writer, step=7))
    assert writer.scalars["layer0/rank_imbalance"][0] >= 1 and writer.scalars["expert_s"][0] > 0, writer.scalars
    assert {step for _, step in writer.scalars.values()} == {7}


def the_lines_for_one_gpu():
    lines = blocks()[1][3].replace('"MODEL"', '"examples/tiny-moe"').replace('"cuda"', '"cpu"')
    text = torch.tensor([list(b"The laws of most jurisdictions throughout the world")])
    names = dict(batches=[text, text])
    os.environ["ARISTOS_DEVICE"] = "emulated"
    try:
        exec(compile(lines, str(PAGE), "exec"), names)
    finally:
        os.environ["ARISTOS_DEVICE"] = "cpu"
    layer = names["model"].model.layers[0].mlp.experts
    moments = names["optimizer"].state[layer.gate_up_proj]["exp_avg"]
    assert moments.isfinite().all() and moments.any(), "the experts have no gradient"


def public_functions():
    """Yields names and functions of the package, without those of the native part, whose types are in a stub."""
    for name in aristos.__all__:
        value = getattr(aristos, name)
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            for of_class, method in vars(value).items():
                method = getattr(method, "fget", getattr(method, "__func__", method))
                if inspect.isfunction(method) and (of_class == "__init__" or not of_class.startswith("_")):
                    yield f"{name}.{of_class}", method


def public_functions_have_type_hints():
    missing, count = [], 0
    for name, function in public_functions():
        signature = inspect.signature(function)
        names = [one.name for one in signature.parameters.values() if one.annotation is one.empty and one.name not in ("self", "cls")]
        names += ["return"] if signature.return_annotation is signature.empty and not name.endswith("__init__") else []
        missing += [f"{name}: {one}" for one in names]
        count += 1
    assert not missing, missing
    # Type checkers read the hints only if the package has this file.
    assert (pathlib.Path(aristos.__file__).parent / "py.typed").exists()
    return f"{count} functions"


CASES = [
    the_ten_lines,
    the_loop_with_data_parallelism,
    the_loop_with_router_replay,
    the_routers_of_the_table,
    the_lines_for_tensorboard,
    public_functions_have_type_hints,
]
