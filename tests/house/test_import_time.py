"""`import ridgeline` and `ridgeline --help` are quick, and import no torch."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "scipy",
    "plotly",
    "starlette",
    "fastapi",
    "rich",
    "pydantic",
)
HELP = "from ridgeline.cli.main import main; main(['--help'])"
WITHOUT = f"""
import sys
{{}}
heavy = [name for name in {HEAVY!r} if name in sys.modules]
sys.exit(f"imported {{{{heavy}}}}" if heavy else 0)
"""


@pytest.mark.parametrize("what", ["import ridgeline", "import ridgeline.cli.main", HELP])
def test_nothing_heavy_is_imported(what: str) -> None:
    code = WITHOUT.format(what).replace("{{", "{").replace("}}", "}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def cpu_s(code: str) -> float:
    """CPU time of the code in a fresh interpreter: what waiting for others cannot spoil."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


REFERENCE = "import asyncio, argparse, logging.handlers, unittest, xmlrpc.client"
"""Modules of the standard library that take 0.23 s where the help takes 0.19 s."""


@pytest.mark.parametrize("what", ["import ridgeline", HELP])
def test_it_is_quick(what: str) -> None:
    # At most 0.25 s where the reference takes 0.23 s: a slow or busy machine slows both. Processes
    # on the same core slow a run, so the first fast one counts.
    assert any(cpu_s(what) < 1.1 * cpu_s(REFERENCE) for _ in range(6))


COLLECTIONS = """
import gc
begun = []
gc.callbacks.append(lambda phase, info: begun.append(phase))
import ridgeline.engine.import_torch
import sys
assert "torch" in sys.modules and gc.isenabled()
print(begun.count("start"))
"""


@pytest.mark.slow
def test_torch_is_imported_with_the_collector_at_rest() -> None:
    """Some 380 collections else: a twelfth of the time until an engine is ready."""
    done = subprocess.run(
        [sys.executable, "-c", COLLECTIONS], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 20
