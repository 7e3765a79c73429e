"""Tables of `ridgeline models`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from ridgeline.report.numbers import rounded
from ridgeline.workflows.models.downloaded_models import DownloadedModel, DownloadedModels
from ridgeline.workflows.models.fitting_models import FORMATS, FittingModel, FittingModels


def downloaded_table(found: DownloadedModels) -> Table:
    """The models that are here, one line each."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("model", "disk", "parameters", "weights", "runs here"):
        table.add_column(head, justify="right" if head in ("disk", "parameters") else "left")
    for model in found.models:
        table.add_row(
            model.name,
            f"{model.disk_bytes / 1e6:,.0f} MB",
            "" if model.num_params is None else short_count(model.num_params),
            model.weights or "",
            _runs(model, found.available_bytes),
        )
    return table


def _runs(model: DownloadedModel, available_bytes: int) -> str:
    if model.problem is not None:
        return f"no: {model.problem.split(';')[0]}"
    if not model.fits:
        return f"no: more than the {available_bytes / 1e9:,.1f} GB of memory that are free"
    return "yes"


def fitting_lines(found: FittingModels, width: int | None) -> Iterator[Text]:
    """The lines of the published models that fit, smallest first, under a head.

    No name is broken: a repository that exceeds `width` is on the following line. None: no limit.
    """
    rows = [("model", "params", *FORMATS), *map(_fitting_cells, found.models)]
    repositories = ["repository", *map(_repository, found.models)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, (row, repository) in enumerate(zip(rows, repositories, strict=True)):
        name, *figures = row
        cells = [f"{figure:>{wide}}" for figure, wide in zip(figures, widths[1:], strict=True)]
        line = " ".join((name.ljust(widths[0]), *cells))
        is_wide = width is not None and len(line) + 1 + len(repository) > width
        lead = "\n  " if is_wide else " "
        text = Text(line, style="bold" if number == 0 else "")
        yield text.append(lead + repository, style="dim") if repository else text


def _fitting_cells(model: FittingModel) -> tuple[str, ...]:
    speeds = [model.speeds.get(name) for name in FORMATS]
    shown = ("–" if speed is None else rounded(speed.tokens_per_s) for speed in speeds)
    return (model.name, short_count(model.num_params), *shown)


def _repository(model: FittingModel) -> str:
    return f"{model.hub or ''}{'' if model.runs else ' (not by this engine)'}".strip()


def fitting_notes(found: FittingModels) -> Iterator[str]:
    """What the figures of the table mean."""
    yield (
        f"{len(found.models)} published models fit {found.device} "
        f"({found.memory_bytes / 1e9:,.1f} GB of memory); {found.num_too_large} do not."
    )
    if found.is_calibrated:
        yield "Output tokens per second of one client, predicted from the calibration."
    else:
        yield (
            "Output tokens per second of one client at most: the roofline of this machine as "
            "probed. For predictions: ridgeline calibrate --engine smollm2, then --calibration "
            "FILE."
        )


def short_count(number: int) -> str:
    """1,235,814,400 as 1.24 B."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= 0.9995 * scale:
            return f"{rounded(number / scale)} {unit}"
    return f"{number:,}"
