"""The project's own source as the house tests read it: files, modules, syntax trees, functions."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def files(*folders: str) -> list[Path]:
    """Python files under the folders, in order."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def tracked() -> list[Path]:
    """Every file that is or would be tracked: git's list where there is git, else everything."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).is_file()]
    skipped = {".venv", "build", ".git"}
    return [p for p in ROOT.rglob("*") if p.is_file() and not skipped & set(p.parts)]


def name_of(path: Path) -> str:
    """Path from the root, with slashes: how a test names a file."""
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    """`ridgeline/engine/scheduler/plan.py` → `ridgeline.engine.scheduler.plan`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that the file imports, at its head or inside a function, with the line."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level]
            origin = ".".join(filter(None, [*(base if node.level else []), node.module]))
            for alias in node.names:
                yield f"{origin}.{alias.name}", node.lineno


def functions(path: Path) -> Iterator[tuple[str, Function]]:
    """(`file::Class.name`, node) of every function of the file."""
    yield from _functions(tree(path), f"{name_of(path)}::")


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, child
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)
