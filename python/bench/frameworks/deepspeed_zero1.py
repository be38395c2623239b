"""DeepSpeed: ZeRO-1"""

import deepspeed
import torch
from common import Net, batches

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
config = dict(train_micro_batch_size_per_gpu=4, zero_optimization=dict(stage=1), zero_allow_untested_optimizer=True)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
losses = []
for batch in batches():
    loss = engine(batch)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
