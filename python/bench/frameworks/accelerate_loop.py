"""accelerate"""

import torch
from accelerate import Accelerator
from common import Net, batches

import aristos

accelerator = Accelerator(cpu=True)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
parallel, optimizer = accelerator.prepare(aristos.exclude_experts(model), optimizer)
losses = []
for batch in batches():
    loss = parallel(batch)
    accelerator.backward(loss)
    aristos.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
