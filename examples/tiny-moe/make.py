"""Makes the bundled example: python examples/tiny-moe/make.py (in the environment of tools/oracle-env)

Trains a byte-level Qwen3-MoE language model of two layers on text.txt for about a minute on a CPU, with
`transformers`, and writes beside itself
    config.json, model.safetensors    the model, in bf16, as save_pretrained writes it
    hidden_states.safetensors         for the text's first TOKENS bytes, at the MoE block of layer LAYER: its input
                                      (hidden_states) and the gradient of the loss at its output (grad_output), in f32
The text is the opening of Moby-Dick by Herman Melville (1851), in the public domain.
"""

import os
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

HERE = Path(__file__).parent
LAYER = 1
TOKENS = 512
STEPS = 250
BATCH, LENGTH = 2, 512

CONFIG = Qwen3MoeConfig(
    vocab_size=128,
    hidden_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    moe_intermediate_size=104,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    max_position_embeddings=TOKENS,
    tie_word_embeddings=True,
    output_router_logits=True,  # the training loss includes the load-balancing loss
    router_aux_loss_coef=0.002,
    experts_implementation="eager",
)


def train(model, text):
    gen = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS)
    for step in range(STEPS):
        starts = torch.randint(0, len(text) - LENGTH, (BATCH,), generator=gen)
        batch = torch.stack([text[s : s + LENGTH] for s in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.3f} per byte")


def capture(model, tokens):
    """The MoE block's input, the gradient of the mean loss at its output, and its choice of experts."""
    seen = {}

    def hook(block, args, output):
        seen["input"] = args[0].detach()[0]
        output.register_hook(lambda grad: seen.update(grad=grad.detach()[0]))

    block = model.model.layers[LAYER].mlp
    handle = block.register_forward_hook(hook)
    loss = model(input_ids=tokens[None], labels=tokens[None], output_router_logits=False).loss
    loss.backward()
    handle.remove()
    with torch.no_grad():
        chosen = block.gate(seen["input"])[-1]
    print(f"loss {loss.item():.3f}; tokens per expert {torch.bincount(chosen.flatten(), minlength=8).tolist()}")
    return seen["input"], seen["grad"]


def main():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # one order of summation: the same files every time
    text = torch.tensor(list((HERE / "text.txt").read_bytes()))
    model = Qwen3MoeForCausalLM(CONFIG)
    train(model, text)
    model = model.to(torch.bfloat16)
    model.save_pretrained(HERE)
    (HERE / "generation_config.json").unlink(missing_ok=True)
    # What is captured is what the weights on disk give, computed in f32.
    hidden_states, grad_output = capture(model.float(), text[:TOKENS])
    tensors = {"hidden_states": hidden_states.contiguous(), "grad_output": grad_output.contiguous()}
    save_file(tensors, HERE / "hidden_states.safetensors")


if __name__ == "__main__":
    main()
