"""`ridgeline quantize`: write a model's weights in fewer bits."""

from __future__ import annotations

from ridgeline.cli.params.fetch_model import fetch_model
from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.live_progress import live_progress
from ridgeline.config.improve import QuantizeFiles, QuantizeOptions
from ridgeline.report.json_line import json_line
from ridgeline.workflows.quantize.quantize import check_options
from ridgeline.workflows.quantize.quantize import quantize as quantize_model


def quantize(call: Invocation) -> None:
    """`ridgeline quantize`."""
    files, options = call.read(QuantizeFiles), call.read(QuantizeOptions)
    check_options(files.output, options)  # before a large model is downloaded
    model = fetch_model(files.model)
    with live_progress(steps=True) as observer:
        result = quantize_model(model, files.output, options, observer)
    if files.json:
        print(json_line(result.to_dict()))
        return
    size = f"{result.written_bytes / 1e6:,.1f} MB in {result.output}"
    print(f"{result.model}: {size}, {result.seconds:.1f} s")
    print(f"  in memory when opened: {result.memory_bytes / 1e6:,.1f} MB")
    if options.method in ("rtn", "hqq") and options.numbers == "int" and options.bits < 8:
        print(f"  {options.bits} bits without calibration cost quality:")
        print("  --method gptq or --bits 8 cost less")
    print(f"To compare it with the original: ridgeline eval {result.model} {result.path}")
    print(f"To serve it: ridgeline serve {result.path}")
