"""The project's own source as the house tests read it: every file is parsed and walked once."""

from __future__ import annotations

import ast
import gc
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Source:
    """What one walk over a file's syntax tree finds."""

    tree: ast.Module
    num_lines: int
    imports: list[tuple[str, int]] = field(default_factory=list)
    """(module or module.name, line) of every import, at the top or inside a function."""
    type_imports: set[int] = field(default_factory=set)
    """Lines of imports under `if TYPE_CHECKING:`."""
    functions: list[tuple[str, Function]] = field(default_factory=list)
    """(`file::Class.name`, node), methods and nested functions included."""
    classes: list[tuple[str, int]] = field(default_factory=list)
    calls: list[ast.Call] = field(default_factory=list)


def files(*folders: str) -> list[Path]:
    """Python files under the folders, sorted."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
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


def source(path: Path) -> Source:
    """What a single walk over a file finds; the first call parses all files of its folder."""
    folder, _, _ = name_of(path).partition("/")
    known = _sources(ROOT / folder)
    if path not in known:  # planted by a test
        known[path] = _parse(path)
    return known[path]


@cache
def _sources(folder: Path) -> dict[Path, Source]:
    was_enabled = gc.isenabled()
    gc.disable()  # trees are large acyclic allocations: collections between files triple the time
    try:
        return {path: _parse(path) for path in folder.rglob("*.py")}
    finally:
        if was_enabled:
            gc.enable()


def _parse(path: Path) -> Source:
    text, module = path.read_text(encoding="utf-8"), module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    parsed = Source(ast.parse(text, filename=str(path)), num_lines=text.count("\n"))
    _collect(parsed.tree, f"{name_of(path)}::", package, parsed)
    return parsed


_LEAVES = (ast.Name, ast.Constant, ast.expr_context, ast.operator, ast.cmpop)
"""Nodes with nothing to collect below them: more than half of all."""


def _collect(node: ast.AST, prefix: str, package: str, into: Source) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _LEAVES):
            continue
        inner = prefix
        if isinstance(child, Function):
            into.functions.append((prefix + child.name, child))
            inner = f"{prefix}{child.name}."
        elif isinstance(child, ast.ClassDef):
            into.classes.append((child.name, child.lineno))
            inner = f"{prefix}{child.name}."
        elif isinstance(child, ast.Import):
            into.imports.extend((alias.name, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            origin = _origin(child, package)
            into.imports.extend((f"{origin}.{alias.name}", child.lineno) for alias in child.names)
        elif isinstance(child, ast.Call):
            into.calls.append(child)
        elif isinstance(child, ast.If) and _names(child.test, "TYPE_CHECKING"):
            into.type_imports.update(range(child.lineno, (child.end_lineno or 0) + 1))
        _collect(child, inner, package, into)


def _names(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _origin(node: ast.ImportFrom, package: str) -> str:
    """The absolute module of `from X import …`, relative imports resolved."""
    parts = package.split(".")
    base = parts[: len(parts) + 1 - node.level] if node.level else []
    return ".".join(filter(None, [*base, node.module]))


def tree(path: Path) -> ast.Module:
    return source(path).tree


def imports(path: Path) -> list[tuple[str, int]]:
    return source(path).imports


def functions(path: Path) -> list[tuple[str, Function]]:
    return source(path).functions


def has_docstring(path: Path) -> bool:
    """Whether the module begins with a string, found without parsing all of it."""
    with path.open("rb") as lines:
        for token in tokenize.tokenize(lines.readline):
            if token.type not in (tokenize.ENCODING, tokenize.COMMENT, tokenize.NL):
                return token.type == tokenize.STRING
    return False


def imported_modules(path: Path) -> Iterator[tuple[str, int]]:
    """Modules below ridgeline/ that the file imports: `from a.b import c` is a.b.c or a.b."""
    modules = _modules()
    for name, line in imports(path):
        if name in modules:
            yield name, line
        elif name.rpartition(".")[0] in modules:
            yield name.rpartition(".")[0], line


@cache
def _modules() -> frozenset[str]:
    return frozenset(module_of(path) for path in files("ridgeline")) - {"ridgeline"}
