"""`ridgeline eval A B`: what B says differently from A on held-out text, and whether it is little.

First the floor: A against itself on another number of threads, which is what rounding alone does.
Then B, judged by the thresholds and the paired intervals that `optimize` keeps a lossy rung by.
Last a control: A with one block's feed-forward output three times too large, which must fail; where
it does not, the text is too short to see anything, and no verdict is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from ridgeline.cli.lab import heldout_pieces
from ridgeline.engine.model.load import load_decoder
from ridgeline.engine.resolve import Resolved, resolve
from ridgeline.engine.runner import TorchRunner
from ridgeline.engine.text import load_tokenizer
from ridgeline.errors import BadInput
from ridgeline.optimize import quality
from ridgeline.optimize.quality import Array, Quality
from ridgeline.settings import Settings

LOUD = 3.0  # times, the control's feed-forward output
BUCKETS = (16, 64)  # ends of the contexts' lengths


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """The figures. `kl_by_context`: mean KL of positions by how many tokens they had read."""

    floor: Quality
    candidate: Quality
    kl_by_context: dict[str, float]
    control: Quality
    verdict: str


def command(a: Settings, b: Settings, as_json: bool) -> int:
    """Print the panel; 0 where B passes, 1 where it fails or nothing can be said."""
    panel = evaluate(a, b)
    if as_json:
        print(msgspec.json.encode(panel).decode())
    else:
        _print(a.model, b.model, panel)
    return 0 if panel.verdict == "pass" else 1


def evaluate(a: Settings, b: Settings) -> Panel:
    """Compare two configurations. Raises BadInput where their vocabularies differ."""
    gate, size = quality.shipped()
    first, second = resolve(a), resolve(b)
    if first.spec.vocab_size != second.spec.vocab_size:
        raise BadInput(
            "the models have different vocabularies: their distributions cannot be compared",
            value=f"{first.spec.vocab_size} and {second.spec.vocab_size}",
        )
    pieces = heldout_pieces(load_tokenizer(a.model), a)
    pieces = pieces[: quality.affordable(pieces, first.spec.vocab_size, size)]
    before = [np.asarray(each) for each in map(_reader(first), pieces)]

    def judged(after: Callable[[Sequence[int]], Array]) -> tuple[Quality, Array]:
        found, kl = quality.compare(pieces, before, after)
        return quality.judge(found, kl, gate, size), kl

    floor, _ = judged(_on_other_threads(first))
    candidate, kl = judged(_reader(second))
    control, _ = judged(_reader(first, loud=True))
    return Panel(
        floor=floor,
        candidate=candidate,
        kl_by_context=_by_context(kl, len(pieces)),
        control=control,
        verdict=candidate.verdict if control.verdict == "fail" else "inconclusive",
    )


def _reader(resolved: Resolved, loud: bool = False) -> Callable[[Sequence[int]], Array]:
    """Log-probabilities [T, V] of a configuration; `loud`: with the control's fault."""
    decoder = load_decoder(
        resolved.model,
        resolved.spec,
        device=resolved.device,
        compute_dtype=getattr(torch, resolved.dtype),
        seed=resolved.seed,
        layer_backend="torch" if loud else "auto",
    )
    if loud:
        block = decoder.blocks[len(decoder.blocks) // 2]
        inner = block.mlp
        block.mlp = lambda x_TC: inner(x_TC) * LOUD  # type: ignore[assignment,unused-ignore]
    runner = TorchRunner(decoder, None, None)  # type: ignore[arg-type]

    def read(tokens: Sequence[int]) -> Array:
        found: Array = torch.log_softmax(runner.logits(tokens), -1).cpu().numpy()
        return found

    return read


def _on_other_threads(resolved: Resolved) -> Callable[[Sequence[int]], Array]:
    before = torch.get_num_threads()
    other = 1 if before > 1 else 2
    torch.set_num_threads(other)
    try:
        read = _reader(resolved)
    finally:
        torch.set_num_threads(before)

    def narrow(tokens: Sequence[int]) -> Array:
        torch.set_num_threads(other)
        try:
            return read(tokens)
        finally:
            torch.set_num_threads(before)

    return narrow


def _by_context(kl: Array, num_windows: int) -> dict[str, float]:
    kl_WT = kl.reshape(num_windows, -1)
    ends = [end for end in BUCKETS if end < kl_WT.shape[1]] + [kl_WT.shape[1]]
    pairs = zip([0, *ends[:-1]], ends, strict=True)
    return {f"{s + 1}-{e}": float(kl_WT[:, s:e].mean()) for s, e in pairs}


def _print(a: str, b: str, panel: Panel) -> None:
    print(f"{b} against {a}: {panel.candidate.num_windows} windows of held-out text")
    for name, found in (
        ("floor: A on other threads", panel.floor),
        ("B", panel.candidate),
        ("control: must fail", panel.control),
    ):
        print(f"  {name}: {found.verdict}")
        for check in found.checks:
            print(f"    {check.name}: {check.found}, limit {check.limit:g}: {check.verdict}")
    before, after = panel.candidate.perplexity_before, panel.candidate.perplexity_after
    print(f"  perplexity {before:.3f} -> {after:.3f}")
    parts = ", ".join(f"{name}: {kl:.2g}" for name, kl in panel.kl_by_context.items())
    print(f"  mean KL by tokens of context: {parts}")
    print(f"verdict: {panel.verdict}")
