"""PEFT: LoRA on experts"""

import torch
from common import Net, batches
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel

import aristos

config = LoraConfig(r=4, target_modules=[], target_parameters=["moe.gate_up_proj", "moe.down_proj"])
model = get_peft_model(Net(), config)
parallel = DistributedDataParallel(aristos.exclude_experts(model), find_unused_parameters=True)
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.05)
losses = []
for batch in [*batches()[:1]] * 8:
    loss = parallel(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
