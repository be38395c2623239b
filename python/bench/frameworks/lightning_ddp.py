"""Lightning: DDPStrategy"""

import pytorch_lightning as pl
import torch
from common import Net, batches
from torch.utils.data import DataLoader

import aristos

losses = []


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch):
        loss = self.net(batch)
        losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm=None):
        aristos.clip_grad_norm_(self.parameters(), gradient_clip_val)


size = aristos.init().size
plain = dict(enable_checkpointing=False, logger=False, enable_progress_bar=False, enable_model_summary=False)
trainer = pl.Trainer(accelerator="cpu", devices=size, strategy="ddp", max_epochs=1, gradient_clip_val=1.0, use_distributed_sampler=False, **plain)
trainer.fit(aristos.exclude_experts(Module()), DataLoader(batches(), batch_size=None))
