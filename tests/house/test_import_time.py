"""`import ridgeline` and `ridgeline --help` import few modules, and no torch."""

from __future__ import annotations

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


MOST_MODULES = {"import ridgeline": 80, HELP: 185}
"""What is imported at most, standard library included: 63 and 169 modules take 25 and 115 ms of CPU
time, and the time grows with their number."""


@pytest.mark.parametrize("what", MOST_MODULES)
def test_few_modules_are_imported(what: str) -> None:
    counted = f"import atexit, sys; atexit.register(lambda: print(len(sys.modules))); {what}"
    done = subprocess.run(
        [sys.executable, "-c", counted], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.split()[-1]) <= MOST_MODULES[what]


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
