"""Runs the routed experts of torchtitan 0.3.0 in Aristos. To use it, pass ``--override.imports aristos.torchtitan.experts``.

The rest of the model does not change, for example the router, the shared experts, and the type bfloat16 in which experts compute.
"""

from dataclasses import dataclass

import torch
from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import RoutedExperts

from . import _group, _replay
from ._experts import experts as run_experts
from ._parameters import local


class AristosRoutedExperts(RoutedExperts):
    """`RoutedExperts` whose dispatch and computation run in Aristos, over the processes of the token dispatcher."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def group(self):
        mesh = getattr(self.token_dispatcher, "ep_mesh", None)
        return _group.alone() if mesh is None else _group.of(mesh.get_group())

    def forward(self, x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E):
        """Like `RoutedExperts.forward`, except that the given number of tokens per expert is not used, because it is counted again."""
        inner, group = self.inner_experts, self.group()
        gate, up, down = (local(weight).bfloat16() for weight in (inner.w1_EFD, inner.w3_EFD, inner.w2_EDF))
        x, ids, scores = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x_BLD, topk_expert_ids_BLK, topk_scores_BLK))
        ids, scores = _replay.routed(self, group, ids, scores, down.shape[0] * group.size)
        out = run_experts(x.bfloat16(), ids, scores, torch.cat([gate, up], dim=1), down, group=group)
        return out.type_as(x_BLD).view(x_BLD.shape)


def _find(module):
    """Finds the experts in torchtitan's MoE."""
    for child in module.children():
        if isinstance(child, AristosRoutedExperts):
            return child, len(local(child.inner_experts.w2_EDF)) * child.group().size, 3


_replay.finders.append(_find)


@override(target=RoutedExperts.Config, description="routed experts by Aristos")
def experts(config):
    """The override that ``override.imports`` must list."""
    return derive(config, AristosRoutedExperts.Config)
