"""`ridgeline quantize`: write a model's weights in fewer bits."""

from __future__ import annotations

from ridgeline.cli.params.fetch_model import fetch_model
from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.live_progress import live_progress
from ridgeline.config.improve import QuantizeFiles, QuantizeOptions
from ridgeline.report.json_line import json_line
from ridgeline.workflows.quantize.quantize import QuantizeResult, check_options
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
    method = "unquantised" if result.method is None else f"by {result.method}"
    print(f"{result.model}: {size}, {method}, {result.seconds:.1f} s")
    print(f"  in memory when opened: {result.memory_bytes / 1e6:,.1f} MB")
    for line in _advice(result, options):
        print(f"  {line}")
    print(f"To compare it with the original: ridgeline eval {result.model} {result.path}")
    print(f"To serve it: ridgeline serve {result.path}")


def _advice(result: QuantizeResult, options: QuantizeOptions) -> list[str]:
    """What costs less quality, where few bits were rounded without calibration."""
    if result.method not in ("rtn", "hqq") or options.numbers != "int" or options.bits == 8:
        return []
    costs = f"{options.bits} bits without calibration cost quality:"
    if result.method_reason:
        return [result.method_reason, costs, "--bits 8 costs less"]
    return [costs, "--method gptq or --bits 8 cost less"]
