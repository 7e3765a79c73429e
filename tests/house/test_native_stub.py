"""The checked-in types of the native module are what nanobind generates from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ridgeline import _native

ROOT = Path(__file__).parents[2]
STUB = ROOT / "ridgeline" / "_native.pyi"


def is_outdated() -> bool:
    """Whether the sources of the module were written after it was built."""
    sources = [path for path in (ROOT / "native").rglob("*") if path.suffix in (".cpp", ".h")]
    built = Path(_native.__file__).stat().st_mtime
    return built < max(path.stat().st_mtime for path in sources if "tests" not in path.parts)


def test_native_stub_is_up_to_date(tmp_path: Path) -> None:
    assert not is_outdated(), "the module is older than native/: make install"
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
