"""Diagnose an export of NVIDIA's profilers (nsys, ncu): where kernel time goes, and its bounds."""

from __future__ import annotations

import codecs
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
        table: dict[str, Any] = plain(self.profile)
        for row, kernel in zip(table["kernels"], self.profile.kernels, strict=True):
            row["bound"] = kernel.bound
        shares = {"kinds": self.profile.by_kind(), "bounds": self.profile.by_bound()}
        return {**table, **shares, "findings": list(self.findings)}


def diagnose_nsight(path: Path) -> NsightResult:
    """Read and diagnose a CSV export. Raises BadInput if it cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInput("cannot read the export", value=str(path), fix=str(error)) from None
    profile = read_profile(_text(content, path))
    return NsightResult(profile=profile, findings=tuple(sentences(profile)))


def _text(content: bytes, path: Path) -> str:
    """The text of an export; PowerShell redirects into UTF-16. Raises BadInput for a binary one."""
    encodings = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
    encoding = encodings.get(content[:2], "utf-8-sig")
    text = content.decode(encoding, errors="replace").replace("\r\n", "\n")
    if "\0" in text:
        export = (
            f"ncu --import {path} --csv --page raw > ncu.csv"
            if path.suffix == ".ncu-rep"
            else f"nsys stats --report cuda_gpu_trace --format csv {path} > trace.csv"
        )
        raise BadInput(
            "this is a binary report of Nsight, or no text",
            value=str(path),
            limit="CSV",
            fix=export,
        )
    return text
