"""Text of the results of `ridgeline prune` and `ridgeline distill`."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.workflows.shrink.distill import DistillResult
from ridgeline.workflows.shrink.prune import NO_SPEED_UP, PruneResult


def render_pruning(result: PruneResult) -> str:
    """What was removed, what it cost, and what to run next."""
    return "\n".join(_lines(result))


def _lines(result: PruneResult) -> Iterator[str]:
    (old, new), (before, after) = result.num_params, result.num_bytes
    yield f"{result.output}: {new / 1e6:,.1f} M of {old / 1e6:,.1f} M parameters,"
    yield f"  {after / 1e6:,.1f} MB of {before / 1e6:,.1f} MB, {result.seconds:.0f} s"
    if result.dropped_layers:
        yield f"  layers removed: {', '.join(map(str, result.dropped_layers))}"
    for name, (wide, narrow) in (
        ("feed-forward channels", result.num_channels),
        ("KV heads", result.num_kv_heads),
    ):
        if narrow < wide:
            yield f"  {name}: {narrow:,} of {wide:,} in every layer"
    first, last = result.perplexity
    yield f"  perplexity of held-out text: {first:.2f} before, {last:.2f} after"
    yield "  layer  error of its output  zeros"
    for index, layer in enumerate(result.layers):
        yield f"  {index:>5}  {layer.error:>19.1%}  {layer.zeros:>5.0%}"
    if any(layer.zeros > 0.05 for layer in result.layers):
        yield f"  {NO_SPEED_UP}"
    if result.is_smaller:
        yield f"Repair it: ridgeline distill --from-pruned {result.output} -o {result.output}-tuned"
    yield f"Compare it: ridgeline eval {result.model} {result.output}"
    yield f"Serve it: ridgeline serve {result.output}"


def render_distillation(result: DistillResult) -> str:
    """The loss curve, and the student next to the teacher in fewer bits."""
    return "\n".join(_distillation_lines(result))


def _distillation_lines(result: DistillResult) -> Iterator[str]:
    yield f"{result.output}: {result.num_tokens:,} tokens of text, {result.seconds:.0f} s"
    yield "    step   tokens  loss of held-out text"
    for point in result.curve:
        yield f"  {point.step:>6}  {point.num_tokens:>7,}  {point.held_loss:.4f}"
    yield "  model            MB in memory  perplexity  KL     same token  tokens/s"
    for row in result.models:
        speed = "" if row.tokens_per_s is None else f"{row.tokens_per_s:.1f}"
        yield (
            f"  {row.name:<15}  {row.weight_bytes / 1e6:>12,.1f}  {row.perplexity:>10.2f}"
            f"  {row.kl:.3f}  {row.agreement:>10.1%}  {speed:>8}"
        )
    yield f"Compare it: ridgeline eval {result.teacher} {result.output}"
    yield f"Serve it: ridgeline serve {result.output}"
