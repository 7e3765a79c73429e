"""Train Ridgeline's embedded demo model and its draft model from scratch, on a CPU.

Stages: data -> train -> export (checks itself against transformers) -> card.  For example:

    python scripts/train_demo_model.py data   --work build/demo
    python scripts/train_demo_model.py train  --work build/demo --size demo  --minutes 55
    python scripts/train_demo_model.py export --work build/demo --size demo
    python scripts/train_demo_model.py train  --work build/demo --size draft --minutes 10 --distil
    python scripts/train_demo_model.py export --work build/demo --size draft
    python scripts/train_demo_model.py card   --work build/demo --size demo   (then --size draft)

The learning-rate schedule follows the clock (``--minutes``) because the speed of a shared machine
drifts; the loss record keeps progress, tokens and multiplier of each logged step.  ``--tokens``
replaces the clock by a token count, which makes a run repeatable: give it the recorded total.
``--start DIR`` goes on from an exported model with a separate schedule; ``--repeats 0.4`` shows
text twice in that share of the windows (demo_windows.py); ``--bf16`` multiplies in bfloat16, with
weights and their updates in fp32: twice as fast where the CPU has AMX.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import shutil
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo_data import collect, default_docs, prepare
from demo_export import export, heldout_ids, write_card
from demo_model import Optimiser, Shape, TinyLlama
from demo_windows import Windows, copied
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

SHAPES = {
    "demo": Shape(4096, hidden=256, layers=6, heads=4, kv_heads=2, ffn=704),
    "draft": Shape(4096, hidden=96, layers=2, heads=3, kv_heads=1, ffn=256),
}
RATES = {"demo": (0.02, 0.006), "draft": (0.02, 0.01)}
# (progress at which the phase ends, sequence length): the long tail trains every position.
PHASES = ((0.87, 512), (0.94, 1024), (1.01, 2048))
BATCH_TOKENS = 4096
WARMUP = 0.02
DISTIL_FROM = 0.3
FIELDS = ("step", "progress", "tokens", "seconds", "seq_len", "lr_scale", "loss", "heldout_loss")


@dataclass
class Clock:
    """How far the run is; survives a resume because it is stored in the checkpoint.

    A run that goes on from an exported model counts on from what that had seen (``start_``).
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    drawn: int = 0
    drawn_length: int = 0
    start_step: int = 0
    start_tokens: int = 0
    start_seconds: float = 0.0

    def progress(self, args: argparse.Namespace) -> float:
        if args.tokens:
            return (self.tokens - self.start_tokens) / args.tokens
        return (self.seconds - self.start_seconds) / (60 * args.minutes)


def sequence_length(progress: float) -> int:
    return next(length for end, length in PHASES if progress < end)


def lr_scale(progress: float) -> float:
    """Linear warm-up, then linear decay that reaches zero exactly at the end."""
    return min(progress / WARMUP + 0.02, 1.0) * max(0.0, (1 - progress) / (1 - WARMUP))


def save_checkpoint(path: Path, model: TinyLlama, opt: Optimiser, clock: Clock) -> None:
    """Weights, optimiser state and counters in one safetensors file, replaced atomically."""
    tensors = {f"p.{n}": p.detach().contiguous() for n, p in model.named_parameters()}
    tensors |= {f"o.{n}": t for n, t in opt.state.items()}
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, metadata={"clock": json.dumps(asdict(clock))})
    temporary.replace(path)


@torch.no_grad()
def load_checkpoint(path: Path, model: TinyLlama, opt: Optimiser | None) -> Clock:
    with safe_open(path, framework="pt") as file:
        clock = Clock(**json.loads(file.metadata()["clock"]))
        for name, p in model.named_parameters():
            p.copy_(file.get_tensor(f"p.{name}"))
        for name in opt.state if opt else ():
            opt.state[name].copy_(file.get_tensor(f"o.{name}"))
    if opt:
        opt.count = clock.step - clock.start_step
    return clock


@torch.no_grad()
def load_start(args: argparse.Namespace, model: TinyLlama) -> Clock:
    """An exported model's weights, its record, and how much it had seen."""
    weights = load_file(args.start / "model.safetensors")
    model.load_state_dict({name: t.float() for name, t in weights.items()})
    shutil.copyfile(args.start / "loss.csv", args.work / f"{args.size}.csv")
    seen = json.loads((args.start / "manifest.json").read_text())["training"]
    step, tokens, seconds = seen["step"], seen["tokens"], seen["seconds"]
    return Clock(step, tokens, seconds, 0, 0, step, tokens, seconds)


def windows(args: argparse.Namespace, clock: Clock) -> Windows:
    """The training text as `prepare` left it, and its files where it is to be shown twice."""
    stream = np.fromfile(args.work / "train.u16", dtype=np.uint16)
    if not args.repeats:
        return Windows(stream, args.seed, drawn=clock.drawn, length=clock.drawn_length)
    texts = [i.text for i in collect(args.stdlib, args.docs) if i.split == "train"]
    tok = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    drawn = clock.drawn, clock.drawn_length
    return Windows(stream, args.seed, args.repeats, tok, texts, *drawn)


def load_teacher(work: Path) -> TinyLlama:
    """The finished demo model, for distillation."""
    teacher = TinyLlama(SHAPES["demo"])
    load_checkpoint(work / "demo.safetensors", teacher, None)
    return teacher.eval()


@torch.no_grad()
def inherit_embedding(student: TinyLlama, teacher: TinyLlama) -> None:
    """Start the student's embedding from the teacher's leading principal components."""
    weight = teacher.model.embed_tokens.weight
    _, _, basis = torch.linalg.svd(weight - weight.mean(0), full_matrices=False)
    small = weight @ basis[: student.shape.hidden].T
    student.model.embed_tokens.weight.copy_(small * (0.05 / small.std()))


def distil_loss(student: TinyLlama, teacher: TinyLlama, ids: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy against the teacher's distribution, which is what acceptance rewards."""
    with torch.no_grad():
        soft = teacher.logits(ids).flatten(0, 1).softmax(-1)
    return F.cross_entropy(student.logits(ids).flatten(0, 1), soft)


@torch.no_grad()
def heldout_loss(model: TinyLlama, ids: Tensor, windows: int = 32) -> float:
    """A quick look at the first held-out windows of 512; the card has the full figure."""
    part = ids[: windows * 512 + 1]
    x, y = part[:-1].view(-1, 512), part[1:].view(-1, 512)
    pairs = zip(x.split(8), y.split(8), strict=True)
    return float(np.mean([model(a, b).item() for a, b in pairs]))


class Record:
    """The loss curve, appended to as training goes so that a crash loses nothing."""

    def __init__(self, path: Path, last_step: int) -> None:
        """Keep rows up to the checkpoint's step: later ones are about to be made again."""
        self.path = path
        rows = path.read_text().splitlines()[1:] if last_step and path.exists() else []
        kept = [row for row in rows if int(row.split(",")[0]) <= last_step]
        path.write_text("\n".join([",".join(FIELDS), *kept]) + "\n")

    def add(self, clock: Clock, progress: float, length: int, loss: float, held: str) -> None:
        row = (clock.step, f"{progress:.5f}", clock.tokens, f"{clock.seconds:.1f}", length,
               f"{lr_scale(progress):.5f}", f"{loss:.4f}", held)  # fmt: skip
        with self.path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(row)


def train(args: argparse.Namespace) -> None:
    """Train one size until the time or token budget is spent."""
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    held = torch.tensor(heldout_ids(args.work, args.assets / "heldout"))
    model = TinyLlama(SHAPES[args.size], seed=args.seed)
    rates = RATES[args.size]
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    opt = Optimiser(model, args.lr or rates[0], args.lr_rest or rates[1], dtype)
    path = args.work / f"{args.size}.safetensors"
    if args.resume and path.exists():
        clock = load_checkpoint(path, model, opt)
    else:
        clock = load_start(args, model) if args.start else Clock()
    record = Record(args.work / f"{args.size}.csv", clock.step)
    teacher = load_teacher(args.work) if args.distil else None
    if teacher is not None and clock.step == 0:
        inherit_embedding(model, teacher)
    loop(args, model, opt, clock, held, record, teacher)
    save_checkpoint(path, model, opt, clock)
    tok = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    share = copied(model, tok, (args.assets / "heldout" / "code.txt").read_text())
    print(f"done: {clock.tokens} tokens, {clock.seconds:.0f} s, copies {share:.1%}", flush=True)


def loop(
    args: argparse.Namespace,
    model: TinyLlama,
    opt: Optimiser,
    clock: Clock,
    held: Tensor,
    record: Record,
    teacher: TinyLlama | None,
) -> None:
    """The steps themselves, with logging, periodic held-out looks and checkpoints."""
    path = args.work / f"{args.size}.safetensors"
    shown = windows(args, clock)
    looked = saved = clock.seconds
    losses: list[float] = []
    while (progress := clock.progress(args)) < 1.0:
        began = time.monotonic()
        length = sequence_length(progress)
        ids, targets = shown.batch(BATCH_TOKENS, length)
        clock.drawn, clock.drawn_length = shown.drawn, shown.length
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            if teacher is not None and (args.start or progress >= DISTIL_FROM):
                loss = distil_loss(model, teacher, ids, targets)
            else:
                loss = model(ids, targets)
        loss.backward()
        opt.step(lr_scale(progress))
        opt.zero_grad()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise RuntimeError(f"loss is {losses[-1]} at step {clock.step}")
        clock.step += 1
        clock.tokens += ids.numel()
        clock.seconds += time.monotonic() - began
        if clock.step % args.log_every == 0:
            began, quick = time.monotonic(), ""
            if clock.seconds - looked >= args.look_every:
                quick, looked = f"{heldout_loss(model, held):.4f}", clock.seconds
            if clock.seconds - saved >= 120:
                saved = clock.seconds
                save_checkpoint(path, model, opt, clock)
            mean, losses = sum(losses) / len(losses), []
            clock.seconds += time.monotonic() - began
            record.add(clock, progress, length, mean, quick)
            report(args, clock, length, mean, quick)


def report(args: argparse.Namespace, clock: Clock, length: int, loss: float, held: str) -> None:
    """One progress line."""
    progress = clock.progress(args)
    seconds, tokens = clock.seconds - clock.start_seconds, clock.tokens - clock.start_tokens
    eta = seconds * (1 / max(progress, 1e-6) - 1)
    print(
        f"{clock.step:6d} {progress:6.1%} seq {length} loss {loss:.4f} "
        f"{'held-out ' + held if held else ''} {tokens / seconds:.0f} tok/s "
        f"ETA {eta / 60:.1f} min",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("data", "train", "export", "card"))
    parser.add_argument("--work", type=Path, required=True, help="scratch directory")
    parser.add_argument("--assets", type=Path, default=Path("ridgeline/assets"))
    parser.add_argument("--size", choices=tuple(SHAPES), default="demo")
    parser.add_argument("--minutes", type=float, default=55.0, help="time budget")
    parser.add_argument("--tokens", type=int, default=0, help="token budget instead of time")
    parser.add_argument("--start", type=Path, help="go on from this exported model")
    parser.add_argument("--repeats", type=float, default=0.0, help="share of text shown twice")
    parser.add_argument("--bf16", action="store_true", help="multiply in bfloat16")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--distil", action="store_true", help="learn from the demo model")
    parser.add_argument("--note", default="", help="card: what was out of the ordinary")
    parser.add_argument("--lr", type=float, default=0.0, help="rate of the matrices (Muon)")
    parser.add_argument("--lr-rest", type=float, default=0.0, help="rate of the rest (AdamW)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--look-every", type=float, default=300.0, help="seconds")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--docs", type=Path, default=default_docs())
    return parser.parse_args()


def load_trained(args: argparse.Namespace, size: str) -> tuple[TinyLlama, Clock]:
    model = TinyLlama(SHAPES[size])
    return model, load_checkpoint(args.work / f"{size}.safetensors", model, None)


def main() -> None:
    args = parse()
    if args.stage == "data":
        info = prepare(args.work, args.assets, 4096, args.stdlib, args.docs)
        print(f"{info['train_tokens']} training tokens, {len(info['files'])} files")
    elif args.stage == "train":
        train(args)
    elif args.stage == "export":
        model, clock = load_trained(args, args.size)
        export(model, asdict(clock), args.work, args.assets, args.size)
    else:
        write_card(args.work, args.assets, args.size, args.note)


if __name__ == "__main__":
    main()
