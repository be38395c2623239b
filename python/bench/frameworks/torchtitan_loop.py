"""torchtitan: debug model of DeepSeek-V3"""

import sys
from unittest import mock

import torch
from common import batches
from torch.distributed.fsdp import FSDPModule

import aristos

# Modules with GPU kernels, which this script does not call.
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.models.deepseek_v3.sharding import set_deepseek_v3_sharding_config

# Without a GPU torchtitan takes CUDA for the type of its meshes.
mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu").start()
size = aristos.init().size
spec = model_registry("debugmodel")
for layer in spec.model.layers:
    # On a CPU the default has no backward.
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
parallelism = ParallelismConfig(expert_parallel_degree=size, spmd_backend="partial_dtensor")
set_deepseek_v3_sharding_config(spec.model, enable_sp=False, enable_ep=size > 1)
apply_overrides(OverrideConfig(imports=["aristos.torchtitan.experts"]), spec.model)
dims = ParallelDims.from_config(parallelism, size)
model = spec.model.build()
how = dict(training=TrainingConfig(), parallelism=parallelism, compile_config=CompileConfig(), ac_config=None, dump_folder="target/frameworks")
spec.parallelize_fn(model, parallel_dims=dims, **how)
model.init_states(buffer_device=None)
for part in model.modules():
    if isinstance(part, FSDPModule):
        # gloo has no product before the sum.
        part.set_force_sum_reduction_for_comms(True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
losses = []
for batch in batches():
    loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
    (loss / size).backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
