"""Megatron-Core: MoE layer of a specification"""

from unittest import mock

import torch
from common import Net, batches
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import silu
from torch.nn.parallel import DistributedDataParallel

import aristos.megatron

# Megatron's router asks for the current GPU and for Transformer Engine, even if neither exists.
mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")).start()
mock.patch("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, create=True).start()
size = aristos.init().size
parallel_state.initialize_model_parallel(expert_model_parallel_size=size)
sizes = dict(num_layers=1, hidden_size=32, num_attention_heads=2, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=48)
how = dict(gated_linear_unit=True, activation_func=silu, add_bias_linear=False, use_cpu_initialization=True)
spec = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False).submodules.mlp
spec = ModuleSpec(module=aristos.megatron.MoELayer, submodules=spec.submodules, metainfo=spec.metainfo)
model = Net()
layer = model.moe = build_module(spec, config=TransformerConfig(**sizes, **how))
model.forward = lambda batch: torch.nn.functional.cross_entropy(
    model.head(layer(model.embed(batch[:, :-1]).transpose(0, 1).contiguous())[0].transpose(0, 1)).flatten(0, 1), batch[:, 1:].flatten()
)
# Experts are this process's own: DDP averages the other gradients.
experts = [name for name, parameter in model.named_parameters() if not getattr(parameter, "allreduce", True)]
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
parallel = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for batch in batches():
    loss = parallel(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
