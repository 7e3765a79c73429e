"""Diagnose an export of NVIDIA's profilers (nsys, ncu): where kernel time goes, and its bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ridgeline.diagnose.nsight import GpuProfile, read_profile, sentences
from ridgeline.errors import BadInput
from ridgeline.report.json_line import plain
from ridgeline.report.result import Result


class NsightResult(Result, frozen=True, kw_only=True):
    """The kernels of an export, and the findings about them."""

    profile: GpuProfile
    findings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        kinds = self.profile.by_kind()
        return {**plain(self.profile), "kinds": kinds, "findings": list(self.findings)}


def diagnose_nsight(path: Path) -> NsightResult:
    """Read and diagnose a CSV export. Raises BadInput if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise BadInput("cannot read the export", value=str(path), fix=str(error)) from None
    profile = read_profile(text)
    return NsightResult(profile=profile, findings=tuple(sentences(profile)))
