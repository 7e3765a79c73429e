"""Who may import whom. The table is the design's; a violation is named with its file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.code import ROOT, files, imports, module_of, name_of

FLOOR = {
    *("errors", "paths", "records", "config", "hub", "modelspec"),
    *("hardware", "http_replies", "roofline", "stats", "similarity", "report"),
}
PARTS = {
    "engine.scheduler",
    "engine",
    "fleet",
    "operate",
    "routing",
    "serve",
    "measure",
    "diagnose",
    "plan",
    "optimize",
    "compress",
    "twin",
}
LAW: dict[str, set[str]] = {
    "errors": set(),
    "records": {"errors"},
    "config": {"errors", "records"},
    "paths": set(),
    "http_replies": set(),
    "hub": {"errors", "paths", "records"},
    "modelspec": {"errors", "records", "hub"},
    "hardware": {"errors", "paths", "records", "roofline", "_native"},
    "roofline": {"errors", "records"},
    "stats": {"errors", "report"},
    "similarity": {"errors", "stats"},
    "report": {"errors", "records", "roofline"},
    "routing": {"errors", "records"},
    "engine.scheduler": FLOOR,
    "engine": FLOOR | {"engine.scheduler", "_native"},
    "compress": FLOOR | {"engine", "engine.scheduler"},
    "serve": FLOOR | {"routing"},
    "fleet": FLOOR | {"routing", "serve"},
    "measure": FLOOR,
    "diagnose": FLOOR | {"measure"},
    "operate": FLOOR | {"measure", "diagnose"},
    "plan": FLOOR | {"engine.scheduler", "routing"},
    "optimize": FLOOR | {"measure", "diagnose", "plan"},
    "twin": FLOOR | {"engine", "engine.scheduler", "plan"},
    "workflows": FLOOR | PARTS,
    "api": FLOOR | PARTS | {"workflows"},
    "cli": {"errors", "records", "config", "report", "hub", "workflows", "cli.render"},
    # Renderers draw the records that the parts define; they compute nothing.
    "cli.render": {"errors", "records", "config", "report", "workflows"}
    | {"stats", "modelspec", "hardware", "measure", "diagnose", "plan", "optimize"},
}
"""Part → the other parts of ridgeline that it may import."""

FORBIDDEN: dict[str, set[str]] = {
    "errors": {"torch", "numpy"},
    "records": {"torch", "numpy"},
    "config": {"torch", "numpy"},
    "hub": {"torch", "numpy", "transformers"},
    "modelspec": {"torch", "transformers"},
    "engine.scheduler": {
        "torch",
        "numpy",
        "time",
        "datetime",
        "random",
        "secrets",
        "asyncio",
        "threading",
    },
    "serve": {"torch", "numpy", "transformers"},
    "fleet": {"torch", "numpy", "transformers"},
    "measure": {"torch", "transformers"},
    "diagnose": {"torch"},
    "plan": {"torch", "time", "random"},
    "routing": {"torch", "time", "random", "asyncio"},
    "optimize": {"torch"},
    "workflows": {"transformers", "typer", "rich", "cyclopts", "click", "textual"},
    "api": {"torch", "transformers", "typer", "rich", "cyclopts", "click", "textual"},
    "cli": {"transformers"},
}
"""Part → outside modules that it must not import, not even inside a function."""


EXCEPTIONS: dict[str, set[str]] = {
    # A conversation keeps its engine open from turn to turn.
    "ridgeline/cli/commands/run/chat.py": {"engine"},
    # It tells a model's name from a topic while the words are parsed.
    "ridgeline/cli/params/explain_command.py": {"modelspec"},
}
"""File → parts that it may import in addition."""

TOP = [ROOT / "ridgeline" / name for name in ("__init__.py", "__main__.py")]
"""They name the parts that they open on first use."""


def part_of(module: str, parts: set[str]) -> str | None:
    """The longest part with the module: ridgeline.engine.scheduler.plan → engine.scheduler."""
    inner = module.removeprefix("ridgeline.")
    fitting = [part for part in parts if inner == part or inner.startswith(part + ".")]
    return max(fitting, key=len, default=None)


def violations(path: Path) -> list[str]:
    part = part_of(module_of(path), set(LAW))
    if part is None:
        return [f"{name_of(path)}: belongs to no part of the law's table"]
    allowed = LAW[part] | {part} | EXCEPTIONS.get(name_of(path), set())
    found = []
    for module, line in imports(path):
        outside = module.partition(".")[0]
        if outside != "ridgeline":
            if outside in FORBIDDEN.get(part, set()):
                found.append(f"{name_of(path)}:{line}: {part} must not import {outside}")
        elif module != "ridgeline" and not module.startswith("ridgeline.__"):
            target = part_of(module, set(LAW) | allowed)
            if target not in allowed:
                found.append(f"{name_of(path)}:{line}: {part} must not import {module}")
    return found


def test_the_law() -> None:
    inner = [path for path in files("ridgeline") if path not in TOP]
    found = [violation for path in inner for violation in violations(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "line", "violation"),
    [
        (
            "ridgeline/cli/commands/bad.py",
            "from ridgeline.plan.fleet.search import search",
            "cli must not import ridgeline.plan.fleet.search.search",
        ),
        (
            "ridgeline/cli/commands/bad.py",
            "def f():\n    from ridgeline.engine.engine import Engine",
            "cli must not import ridgeline.engine.engine.Engine",
        ),
        (
            "ridgeline/cli/render/bad.py",
            "from ridgeline.cli.params.invocation import Invocation",
            "cli.render must not import ridgeline.cli.params.invocation.Invocation",
        ),
        (
            "ridgeline/workflows/planning/bad.py",
            "from ridgeline.cli.render.measure.top import server_table",
            "workflows must not import ridgeline.cli.render.measure.top.server_table",
        ),
        ("ridgeline/workflows/bad.py", "import rich.console", "workflows must not import rich"),
    ],
)
def test_planted_import_of_the_command_line_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, line: str, violation: str
) -> None:
    monkeypatch.setattr("tests.house.code.ROOT", tmp_path)
    bad = tmp_path / file
    bad.parent.mkdir(parents=True)
    bad.write_text(f"{line}\n")
    number = line.count("\n") + 1
    assert violations(bad) == [f"{file}:{number}: {violation}"]


def test_the_law_can_be_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.house.code.ROOT", tmp_path)
    bad = tmp_path / "ridgeline" / "engine" / "scheduler" / "bad.py"
    bad.parent.mkdir(parents=True)
    bad.write_text(
        '"""x"""\nimport torch\n\ndef f():\n    from ridgeline.engine.execution import runner\n'
        "    from ..quant import x\n    from ridgeline.records import Ask\n"
    )
    assert violations(bad) == [
        "ridgeline/engine/scheduler/bad.py:2: engine.scheduler must not import torch",
        "ridgeline/engine/scheduler/bad.py:5: engine.scheduler must not import "
        "ridgeline.engine.execution.runner",
        "ridgeline/engine/scheduler/bad.py:6: engine.scheduler must not import "
        "ridgeline.engine.quant.x",
    ]
