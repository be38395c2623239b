"""Compares a training step of a transformers model (a Qwen3-MoE of four layers, AdamW) on CPUs between Aristos and transformers.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 python/bench/step_against_transformers.py

Times: medians over alternating steps, of the slowest process. transformers uses `all_to_all` over gloo with `eager` and with `grouped_mm` experts.
"""

import argparse
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

import aristos

BATCH, LENGTH = 4, 256
# hidden, width of an expert, experts, top-k
SHAPES = [(256, 128, 16, 4), (512, 256, 16, 4)]


def slowest(seconds):
    value = torch.tensor([seconds])
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def in_turns(ways, repeats):
    """Times of each implementation, ms, over rounds; the first round is a warm-up."""
    times = {way: [] for way in ways}
    for _ in range(repeats + 1):
        for way, run in ways.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            times[way].append(1e3 * slowest(time.perf_counter() - began))
    return {way: all_ms[1:] for way, all_ms in times.items()}


def say(what, times):
    medians = {way: statistics.median(all_ms) for way, all_ms in times.items()}
    best = min(ms for way, ms in medians.items() if way != "aristos")
    each = ", ".join(f"{way} {medians[way]:.1f} ms ({min(all_ms):.1f} to {max(all_ms):.1f})" for way, all_ms in times.items())
    if dist.get_rank() == 0:
        print(f"{what}: {each}: {medians['aristos'] / best:.2f}", flush=True)


def shared_folder():
    made = tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None
    name = [made and made.name]
    dist.broadcast_object_list(name)
    return made, name[0]


def steps(shape, dtype, repeats):
    hidden, inner, experts, top_k = shape
    size = dist.get_world_size()
    made, folder = shared_folder()
    if made:
        torch.manual_seed(0)
        sizes = dict(hidden_size=hidden, moe_intermediate_size=inner, num_experts=experts, num_experts_per_tok=top_k)
        heads = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=hidden // 8, vocab_size=256, num_hidden_layers=4)
        AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **heads, norm_topk_prob=True)).save_pretrained(folder)
    dist.barrier()
    torch.manual_seed(1 + dist.get_rank())
    tokens = torch.randint(0, 256, (BATCH, LENGTH))

    def step(implementation, own_experts):
        how = DistributedConfig(ep_size=size, fsdp_size=size, ep_implementation=implementation)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, distributed_config=how, experts_implementation=own_experts)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def run():
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()

        return run

    ways = {"aristos": step("aristos", "eager"), "eager": step("all_to_all", "eager"), "grouped_mm": step("all_to_all", "grouped_mm")}
    say(f"step, {str(dtype).removeprefix('torch.')}, hidden {hidden} intermediate {inner} experts {experts} top {top_k}", in_turns(ways, repeats))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    aristos.init()
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            steps(shape, dtype, args.repeats)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
