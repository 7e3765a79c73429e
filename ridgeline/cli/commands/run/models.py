"""`ridgeline pull` and `ridgeline models`: download models, and list them."""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.console import ReportConsole
from ridgeline.cli.render.live_progress import live_progress
from ridgeline.config.shared import DEFAULT_MODEL
from ridgeline.config.tools import ModelsOptions, PullOptions
from ridgeline.errors import BadInput
from ridgeline.hub.download import download, pinned_name
from ridgeline.hub.names import parse_remote
from ridgeline.report.json_line import json_line


def pull(call: Invocation) -> None:
    """`ridgeline pull`."""
    options = call.read(PullOptions)
    name = options.model or DEFAULT_MODEL
    model = parse_remote(name)
    if model is None:
        raise BadInput(
            "this names no model that can be downloaded",
            value=name,
            limit="OWNER/REPO[@REVISION][:QUANTISATION], https://….gguf, or smollm2",
            fix="a local directory or file needs no download: ridgeline chat PATH",
        )
    with live_progress() as observer:
        path = download(model, observer)
    pinned = pinned_name(name)
    as_json = json_line({"model": pinned, "path": str(path)}) if options.json else ""
    print(as_json or f"{pinned}\n{path}")


def models(call: Invocation) -> None:
    """`ridgeline models`."""
    from ridgeline.cli.render.models import downloaded_table, fitting_lines, fitting_notes
    from ridgeline.workflows.models.downloaded_models import list_downloaded
    from ridgeline.workflows.models.fitting_models import list_fitting

    options, console = call.read(ModelsOptions), ReportConsole()
    if options.fit:
        fitting = list_fitting(options.calibration)
        if options.json:
            print(json_line(fitting.to_dict()))
            return
        for line in fitting_lines(fitting, console.width if console.is_terminal else None):
            console.print(line, soft_wrap=True)
        for note in fitting_notes(fitting):
            console.print(note, style="dim", markup=False)
        return
    downloaded = list_downloaded()
    if options.json:
        print(json_line(downloaded.to_dict()))
    else:
        console.print(downloaded_table(downloaded))
