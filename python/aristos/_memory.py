"""The memory of the windows through which processes exchange tokens."""

import json
from typing import Any

import torch

from . import _aristos
from ._moe import MoE

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def memory(config: Any, tokens: int, ranks: int, *, dtype: torch.dtype | None = None) -> int:
    """Returns the number of bytes that each process allocates on the CPU for the windows of a layer. All layers of a model with the same
    sizes share them. Windows that have grown are up to 3.2% larger. The memory of tensors is not included.

    Args:
        config: a model's configuration, from transformers or as the dict of a config.json, or an `MoE`, or a dict of its arguments.
        tokens: the largest number of tokens that a process has in a pass.
        ranks: the number of processes that share the experts.
        dtype: the type of the tokens, float32 or bfloat16; by default that of the configuration.
    """
    for name, value in (("tokens", tokens), ("ranks", ranks)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}, expected an integer of at least 1")
    if isinstance(config, MoE):
        sizes, own = (config.down_proj.shape[1], config.experts, config.top_k), config.down_proj.dtype
    elif isinstance(config, dict) and "model_type" not in config:
        missing = [name for name in ("hidden", "experts", "top_k") if name not in config]
        if missing:
            raise ValueError(f"config has neither model_type nor {missing[0]}, expected a model's configuration or the arguments of an MoE")
        sizes, own = (config["hidden"], config["experts"], config["top_k"]), config.get("dtype")
    else:
        fields = config if isinstance(config, dict) else config.to_dict()
        sizes, own = _aristos.family_sizes(json.dumps(fields, default=str)), fields.get("dtype") or fields.get("torch_dtype")
    dtype = dtype or (getattr(torch, own, None) if isinstance(own, str) else own) or torch.float32
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype}, expected float32 or bfloat16")
    if sizes[1] % ranks:
        raise ValueError(f"ranks is {ranks}, expected a divisor of {sizes[1]}, the number of experts")
    return _aristos.window_bytes(*sizes, _DTYPES[dtype], tokens, ranks)
