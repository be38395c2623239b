"""DDP"""

import torch
from common import Net, batches
from torch.nn.parallel import DistributedDataParallel

import aristos

model = Net()
parallel = DistributedDataParallel(aristos.exclude_experts(model))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for batch in batches():
    loss = parallel(batch)
    loss.backward()
    aristos.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
