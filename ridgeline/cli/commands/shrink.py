"""`ridgeline prune` and `ridgeline distill`: smaller models."""

from __future__ import annotations

from ridgeline.cli.params.fetch_model import fetch_model
from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.live_progress import live_progress
from ridgeline.cli.render.shrink import render_distillation, render_pruning
from ridgeline.config.compression import DistillFiles, DistillOptions, PruneFiles, PruneOptions
from ridgeline.report.json_line import json_line
from ridgeline.workflows.shrink import distill as distillation
from ridgeline.workflows.shrink.prune import check_options
from ridgeline.workflows.shrink.prune import prune as prune_model


def prune(call: Invocation) -> None:
    """`ridgeline prune`."""
    files, options = call.read(PruneFiles), call.read(PruneOptions)
    check_options(files.output, options)  # before a large model is downloaded
    model = fetch_model(files.model)
    with live_progress(steps=True) as observer:
        result = prune_model(model, files.output, options, observer)
    print(json_line(result.to_dict()) if files.json else render_pruning(result))


def distill(call: Invocation) -> None:
    """`ridgeline distill`."""
    files, options = call.read(DistillFiles), call.read(DistillOptions)
    distillation.check_options(files.output, options)  # before a large model is downloaded
    pair = distillation.resolve_models(files)
    pair = distillation.TeacherAndStudent(*(fetch_model(model) for model in pair))
    with live_progress() as observer:
        result = distillation.distill(pair, files.output, options, observer)
    print(json_line(result.to_dict()) if files.json else render_distillation(result))
