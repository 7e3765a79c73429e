"""Text of the results of `ridgeline prune`."""

from __future__ import annotations

from collections.abc import Iterator

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
    yield f"Compare it: ridgeline eval {result.model} {result.output}"
    yield f"Serve it: ridgeline serve {result.output}"
