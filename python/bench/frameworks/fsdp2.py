"""FSDP2"""

import torch
from common import Net, batches
from torch.distributed.fsdp import fully_shard

import aristos

model = Net()
fully_shard(model, mesh=model.moe.group.mesh, ignored_params=aristos.expert_parameters(model))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for batch in batches():
    loss = model(batch)
    loss.backward()
    aristos.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
