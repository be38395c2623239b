"""Trains a byte-level Mixture-of-Experts language model, with or without Aristos.

    python examples/train_text.py --experts eager --out target/train         # without Aristos, one process
    torchrun --nproc-per-node 2 examples/train_text.py --out target/train    # experts on 2 processes
    python examples/train_text.py --plot --out target/train                  # one plot of all runs in target/train

The model is a Qwen3-MoE of transformers with 2.8 million parameters; the data are the licence texts of the Debian package
base-files. The batch of a step does not depend on the number of processes, so loss curves are comparable. CC0-1.0 is
held out, and the loss on its beginning is printed at the end.

Writes to the folder --out: `NAME.json` (losses, tokens per second), `NAME.routing.json` (routing of the last steps, for
`aristos simulate --routing`), and with --save-every checkpoints, which --resume reads with any number of processes.
--from-model fine-tunes a model, preferably on a --text of another kind. --export writes a model for `aristos run`;
examples/tiny-moe was made with

    torchrun --nproc-per-node 2 examples/train_text.py --tiny --length 256 --steps 1200 --learning-rate 2e-3 --export examples/tiny-moe
"""

import argparse
import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

import aristos

TEXTS = pathlib.Path("/usr/share/common-licenses")
HELD_OUT = TEXTS / "CC0-1.0"
EXPERTS, ROUTED_STEPS = 8, 4
# Besides the weights, the export contains a layer's input for this many bytes of the held-out text.
EXPORTED_LAYER, EXPORTED_TOKENS = 1, 512
USUAL = dict(hidden_size=128, num_hidden_layers=4, head_dim=32, intermediate_size=256, moe_intermediate_size=208)
TINY = dict(hidden_size=80, num_hidden_layers=2, head_dim=16, intermediate_size=128, moe_intermediate_size=104)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", default="aristos", choices=["aristos", "all_to_all", "eager", "grouped_mm"], help="implementation of the experts; eager and grouped_mm need one process")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step, over all processes")
    parser.add_argument("--length", type=int, default=128, help="bytes of a sequence")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--warm-up", type=int, default=0, help="steps of linear learning-rate warm-up")
    parser.add_argument("--epsilon", type=float, default=1e-8, help="epsilon of AdamW")
    parser.add_argument("--from-model", type=pathlib.Path, help="folder of a trained model to start from, instead of random weights")
    parser.add_argument("--top-k", type=int, default=2, help=f"experts of a token, of {EXPERTS}")
    parser.add_argument("--tiny", action="store_true", help="a model of 0.5 million parameters instead")
    parser.add_argument("--text", type=pathlib.Path, help=f"a file to train on instead of {TEXTS}")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("target/train"))
    parser.add_argument("--name", help="of the files in --out; by default the experts and the number of processes")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints, 0 for none")
    parser.add_argument("--resume", type=pathlib.Path, help="a checkpoint's folder")
    parser.add_argument("--export", type=pathlib.Path, help="a folder for the trained model in bfloat16, and a layer's input")
    parser.add_argument("--plot", action="store_true", help="draw the losses in --out, train nothing")
    return parser.parse_args()


def read_text(path):
    """The bytes to train on."""
    files = [path] if path else sorted(file for file in TEXTS.glob("*") if not file.is_symlink() and file != HELD_OUT)
    try:
        text = b"\n".join(file.read_bytes() for file in files)
    except OSError as error:
        sys.exit(f"--text {path}: {error.strerror}")
    if len(text) < 10_000:
        sys.exit(f"{path or TEXTS} has {len(text)} bytes of text, expected 10000 or more (apt-get install --reinstall base-files, or --text FILE)")
    return numbers(text)


def numbers(text):
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def config_of(args):
    if args.from_model:
        return Qwen3MoeConfig.from_pretrained(args.from_model)
    return Qwen3MoeConfig(
        vocab_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=EXPERTS,
        num_experts_per_tok=args.top_k,
        norm_topk_prob=True,
        max_position_embeddings=max(args.length, EXPORTED_TOKENS),
        tie_word_embeddings=True,
        **(TINY if args.tiny else USUAL),
    )


def make_model(args, rank, size):
    # All processes, and all runs, start with the same weights.
    start = args.from_model or args.out / f".start-{os.environ.get('MASTER_PORT', args.experts)}"
    if rank == 0 and not args.from_model:
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config_of(args)).save_pretrained(start)
    if size == 1:
        return AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32, experts_implementation=args.experts)
    dist.barrier()
    split = DistributedConfig(ep_size=size, fsdp_size=size, ep_implementation=args.experts)
    return AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32, distributed_config=split)


def batch_of(text, args, step, rank, size):
    """Sequences of this process in a step."""
    gen = torch.Generator().manual_seed(1_000_003 + step)
    starts = torch.randint(0, len(text) - args.length, (args.batch,), generator=gen)
    share = args.batch // size
    return torch.stack([text[s : s + args.length] for s in starts[rank * share : (rank + 1) * share]])


def train(args, rank, size):
    name = args.name or f"{args.experts}-{size}"
    args.out.mkdir(parents=True, exist_ok=True)
    text = read_text(args.text)
    model = make_model(args, rank, size)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, eps=args.epsilon, weight_decay=0.1)
    first = 0
    if args.resume:
        first = resume(model, optimizer, args.resume)
        if first >= args.steps:
            sys.exit(f"--steps is {args.steps}, expected more than the {first} of {args.resume}")
    routing, losses, seconds = aristos.Routing(), [], []
    for step in range(first, args.steps):
        began = time.perf_counter()
        batch = batch_of(text, args, step, rank, size)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1, (step + 1) / max(1, args.warm_up))
        optimizer.zero_grad()
        if args.experts == "aristos" and step >= args.steps - ROUTED_STEPS:
            with routing.step(step):
                loss = model(input_ids=batch, labels=batch).loss
        else:
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if size > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / size)
        seconds.append(time.perf_counter() - began)
        if rank == 0 and (step % 50 == 0 or step == args.steps - 1):
            print(f"{name}: step {step}: loss {losses[-1]:.4f} per byte", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(model, optimizer, step + 1, args.out / f"{name}-step{step + 1}")
    if args.experts == "aristos":
        group = aristos.Group() if size > 1 else aristos.Group.alone()
        routing.write(args.out / f"{name}.routing.json", model.config.num_experts, group)
    if rank == 0:
        usual = sorted(seconds)[len(seconds) // 2]
        rate = args.batch * args.length / usual
        print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, {len(text)} bytes of text, {rate:.0f} tokens/s (median step {usual * 1e3:.1f} ms)")
        result = dict(name=name, first=first, tokens_per_s=rate, median_step_s=usual, losses=losses)
        (args.out / f"{name}.json").write_text(json.dumps(result))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0 and HELD_OUT.exists():
        trained = Qwen3MoeForCausalLM(config_of(args))
        trained.load_state_dict(whole)
        judge(trained, name, args.export)


def judge(model, name, folder):
    """Prints the loss on the held-out text. Writes the model and a layer's input on that text to `folder` if it is given."""
    if folder:
        # Captures the layer with the weights as written to disk, computed in f32.
        model.bfloat16().save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        model.float()
    seen = {}

    def capture(_, inputs, output):
        seen["hidden_states"] = inputs[0].detach()[0].contiguous()
        output.register_hook(lambda grad: seen.update(grad_output=grad[0].contiguous()))

    model.model.layers[EXPORTED_LAYER].mlp.register_forward_hook(capture)
    text = numbers(HELD_OUT.read_bytes()[:EXPORTED_TOKENS])[None]
    loss = model(input_ids=text, labels=text).loss
    loss.backward()
    print(f"{name}: loss {loss.item():.4f} per byte of the {EXPORTED_TOKENS} that are held out")
    if folder:
        save_file(seen, folder / "hidden_states.safetensors")


def save(model, optimizer, step, folder):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    checkpoint.save(dict(model=model_state, optimizer=optimizer_state, step=torch.tensor(step)), checkpoint_id=folder)


def resume(model, optimizer, folder):
    """Reads a checkpoint of any number of processes; returns the step to continue with."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = dict(model=model_state, optimizer=optimizer_state, step=torch.tensor(0))
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["step"])


COLOURS = ["#1b6ca8", "#d1495b", "#2e8b57", "#8a4fbf", "#c77f00", "#444444"]


def far_apart(run, other):
    """The largest relative difference of two runs' losses over their common steps, and its step; None without common steps."""
    first = max(run["first"], other["first"])
    pairs = zip(run["losses"][first - run["first"] :], other["losses"][first - other["first"] :])
    return max(((abs(a - b) / b, step) for step, (a, b) in enumerate(pairs, first)), default=None)


def plot(folder):
    """Plots all runs' losses in one SVG, and prints how far each is from the run without Aristos."""
    runs = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json")) if not file.name.endswith(".routing.json")]
    if not runs:
        sys.exit(f"{folder} has no runs, expected NAME.json files")
    width, height, margin = 720, 420, 50
    last = max(run["first"] + len(run["losses"]) for run in runs)
    top = max(max(run["losses"]) for run in runs)
    x = lambda step: margin + step / max(1, last - 1) * (width - 2 * margin)
    y = lambda loss: height - margin - loss / top * (height - 2 * margin)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for k in range(6):
        loss, step = top * k / 5, (last - 1) * k / 5
        parts.append(f'<line x1="{margin}" x2="{width - margin}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{margin - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.1f}</text>')
        parts.append(f'<text x="{x(step):.1f}" y="{height - margin + 18}" text-anchor="middle">{step:.0f}</text>')
    parts.append(f'<text x="{width / 2}" y="{height - 10}" text-anchor="middle">step</text>')
    parts.append(f'<text x="{margin}" y="{margin - 20}">loss per byte (nats)</text>')
    for k, run in enumerate(runs):
        colour, points = COLOURS[k % len(COLOURS)], enumerate(run["losses"], run["first"])
        line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
        # Curves that lie on each other stay visible: later ones are dashed.
        dash = f' stroke-dasharray="4 {3 * k}"' if k else ""
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>')
        parts.append(f'<text x="{width - margin - 220}" y="{margin + 16 * k}" fill="{colour}">{run["name"]}, {run["tokens_per_s"]:.0f} tokens/s</text>')
        for other in runs:
            if other["name"] == "eager-1" != run["name"] and (most := far_apart(run, other)):
                print("{}: at most {:.1e} from eager-1, relative, at step {}".format(run["name"], *most))
    (folder / "losses.svg").write_text("\n".join(parts) + "\n</svg>\n")
    print(folder / "losses.svg")


def check(args, size):
    """Exits with an error message for the first argument that is out of range."""
    least = dict(steps=1, batch=1, length=2, learning_rate=0, warm_up=0, epsilon=0, save_every=0)
    for name, low in least.items():
        if not getattr(args, name) >= low:
            sys.exit(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected at least {low}")
    if not 1 <= args.top_k <= EXPERTS:
        sys.exit(f"--top-k is {args.top_k}, expected 1 to {EXPERTS}")
    for option, folder, file, what in (
        ("--from-model", args.from_model, "config.json", "trained model"),
        ("--resume", args.resume, ".metadata", "checkpoint"),
    ):
        if folder and not (folder / file).is_file():
            sys.exit(f"{option} {folder} has no {file}, expected the folder of a {what}")
    if args.batch % size:
        sys.exit(f"--batch is {args.batch}, expected a multiple of {size}, the number of processes")
    if args.experts == "all_to_all" and size == 1 or args.experts in ("eager", "grouped_mm") and size > 1:
        sys.exit(f"--experts {args.experts} is for {'several processes' if size == 1 else 'one process'}, and there {'is 1' if size == 1 else f'are {size}'}")


def main():
    args = parse()
    if args.plot:
        return plot(args.out)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    check(args, size)
    if size > 1:
        dist.init_process_group("gloo")
    train(args, int(os.environ.get("RANK", "0")), size)
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
