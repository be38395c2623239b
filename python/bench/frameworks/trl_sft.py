"""TRL: SFTTrainer"""

from common import LENGTH, batches, tiny_moe
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

model = tiny_moe()
bytes_of = Tokenizer(models.WordLevel({chr(byte): byte for byte in range(256)}, unk_token="?"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_of, eos_token="\x00", pad_token="\x00")
data = Dataset.from_dict(dict(input_ids=batches()[..., :LENGTH].flatten(0, 1).tolist()))
how = dict(max_steps=8, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1, lr_scheduler_type="constant")
quiet = dict(use_cpu=True, bf16=False, save_strategy="no", report_to=[], disable_tqdm=True)
trainer = SFTTrainer(model, SFTConfig("target/frameworks", **how, **quiet), train_dataset=data, processing_class=tokenizer)
trainer.train()
losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
