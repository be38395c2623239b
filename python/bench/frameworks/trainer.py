"""transformers: Trainer"""

from common import LENGTH, batches, tiny_moe
from transformers import Trainer, TrainingArguments

model = tiny_moe()
data = [dict(input_ids=row, labels=row) for row in batches()[..., :LENGTH].flatten(0, 1)]
how = dict(max_steps=8, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1, lr_scheduler_type="constant")
quiet = dict(use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True)
trainer = Trainer(model, TrainingArguments("target/frameworks", **how, **quiet), train_dataset=data)
trainer.train()
losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
