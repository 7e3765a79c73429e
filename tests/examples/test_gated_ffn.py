"""The example kernel builds, and every level of it computes the same operator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "kernels"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="the example is built with make")
def test_every_level_matches_the_reference(tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "-C", str(EXAMPLE), "check", f"BUILD={tmp_path}", "CXXFLAGS=-O2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 checks, 0 failures" in done.stdout
