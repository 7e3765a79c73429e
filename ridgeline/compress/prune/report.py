"""What a pruning removed and what it cost: stored in the result as `pruning.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ridgeline.errors import DECODE_ERRORS, BadInput

REPORT_FILE = "pruning.json"


class PrunedLayerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of the result, which was `original` in the source.

    `error`: the distance of its output from the original's, relative to the original's length, on
    held-out text; it accumulates. `zeros`: the share of its weights that are zero.
    """

    original: int
    error: float
    zeros: float
    note: str = ""

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str) -> PrunedLayerReport:
        return msgspec.json.decode(text, type=PrunedLayerReport)


class PruningReport(msgspec.Struct, frozen=True, kw_only=True):
    """A pruned model. Perplexities are of the same held-out windows, as the checkpoint's dtype has
    the weights. `made`: what the run depended on.
    """

    source: str
    dropped_layers: tuple[int, ...]
    num_channels: tuple[int, int]
    num_kv_heads: tuple[int, int]
    num_params: tuple[int, int]
    num_bytes: tuple[int, int]
    perplexity: tuple[float, float]
    layers: tuple[PrunedLayerReport, ...]
    made: dict[str, Any]


def write_report(folder: Path, report: PruningReport) -> None:
    """Store the report with the model."""
    text = msgspec.json.format(msgspec.json.encode(report), indent=1)
    (folder / REPORT_FILE).write_bytes(text)


def read_report(folder: Path) -> PruningReport:
    """The report in a pruned model's folder. Raises BadInput if there is none."""
    try:
        return msgspec.json.decode((folder / REPORT_FILE).read_bytes(), type=PruningReport)
    except (OSError, *DECODE_ERRORS) as error:
        raise BadInput(
            "not a folder that `ridgeline prune` has written",
            value=str(folder),
            fix=f"name one with a {REPORT_FILE}: {error}",
        ) from None
