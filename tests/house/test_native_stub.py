"""The checked-in types of the native module are what nanobind generates from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

STUB = Path(__file__).parents[2] / "ridgeline" / "_native.pyi"


def test_native_stub_is_up_to_date(tmp_path: Path) -> None:
    generated = tmp_path / "_native.pyi"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "nanobind.stubgen",
            "-q",
            "-m",
            "ridgeline._native",
            "-o",
            generated,
        ],
        check=True,
        cwd=STUB.parents[1],
    )
    assert generated.read_text() == STUB.read_text(), "ridgeline/_native.pyi is stale: make stubs"
