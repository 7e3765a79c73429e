"""`ridgeline quantize`: write a model's weights in fewer bits."""

from __future__ import annotations

from pathlib import Path

from ridgeline.cli.params.fetch_model import fetch_model
from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.improve import QuantizeFiles, QuantizeOptions


def quantize(call: Invocation) -> int:
    """`ridgeline quantize`."""
    files = call.read(QuantizeFiles)
    return run_quantize(fetch_model(files.model), files.output, call.read(QuantizeOptions))


def run_quantize(model: str, output: Path, options: QuantizeOptions) -> int:
    """Quantise, and print what was written; the exit code."""
    from ridgeline.cli.render.live_progress import live_progress
    from ridgeline.workflows.quantize.quantize import quantize as quantize_model

    with live_progress(steps=True) as observer:
        result = quantize_model(model, output, options, observer)
    size = f"{result.written_bytes / 1e6:,.1f} MB in {result.output}"
    print(f"{result.model}: {size}, {result.seconds:.1f} s")
    print(f"  in memory when opened: {result.memory_bytes / 1e6:,.1f} MB")
    print(f"To serve it: ridgeline serve {result.path}")
    return 0
