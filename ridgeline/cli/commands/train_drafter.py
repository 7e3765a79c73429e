"""`ridgeline train-drafter MODEL`: train Medusa heads or an EAGLE layer for a model."""

from __future__ import annotations

from ridgeline.cli.params.fetch_model import fetch_model
from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.live_progress import live_progress
from ridgeline.config.improve import TrainDrafterFiles, TrainDrafterOptions
from ridgeline.config.rules import refuse
from ridgeline.report.json_line import json_line
from ridgeline.workflows.train_drafter import check_options
from ridgeline.workflows.train_drafter import train_drafter as train


def train_drafter(call: Invocation) -> None:
    """`ridgeline train-drafter`."""
    files, options = call.read(TrainDrafterFiles), call.read(TrainDrafterOptions)
    has_heads = options.kind == "medusa" or options.heads is None
    refuse([] if has_heads else ["--heads"], f"with --kind {options.kind}")
    check_options(files.output, options)  # before a large model is downloaded
    model = fetch_model(files.model)
    with live_progress() as observer:
        result = train(model, files.output, options, observer)
    if files.json:
        print(json_line(result.to_dict()))
        return
    rates = ", ".join(f"{rate:.2f}" for rate in result.acceptance)
    size = f"{result.num_bytes / 1e6:.1f} MB"
    print(f"{result.output}: {size}, {result.num_tokens:,} tokens, {result.seconds:.0f} s")
    print(f"  acceptance of sampled drafts on held-out text, at positions 1, 2, …: {rates}")
    print(
        f"Use it: ridgeline serve {result.model} --speculative-config '{result.speculative_config}'"
    )
