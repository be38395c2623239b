"""The models and the text that the scripts of this folder share."""

import functools

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import aristos

STEPS, BATCH, LENGTH = 8, 4, 32


def batches():
    """Returns this process's batches of bytes, [steps, batch, length + 1]."""
    group = aristos.init()
    count = STEPS * group.size * BATCH * (LENGTH + 1)
    with open("docs/training.md", "rb") as file:
        text = torch.tensor(list(file.read(count)))
    return text.view(STEPS, group.size, BATCH, LENGTH + 1)[:, group.rank]


class Net(nn.Module):
    """A language model without attention, which returns its loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(256, 32)
        self.moe = aristos.MoE(32, 48, 8, 2, mean_gradients=True, aux_loss_coef=0.01)
        self.head = nn.Linear(32, 256)

    def forward(self, batch):
        logits = self.head(self.moe(self.embed(batch[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) + self.layer().aux_loss

    def layer(self):
        # An adapter's wrapper has the layer inside.
        return next(part for part in self.moe.modules() if isinstance(part, aristos.MoE))


def tiny_moe():
    """Returns the repository's model with experts over all processes, as a model of transformers."""
    size = aristos.init(max_tokens=1024).size
    load = functools.partial(AutoModelForCausalLM.from_pretrained, "examples/tiny-moe", dtype=torch.float32)
    if size == 1:
        return load(experts_implementation="aristos")
    return load(distributed_config=DistributedConfig(ep_size=size, fsdp_size=size, ep_implementation="aristos"))
