"""Functions, files and parameter lists stay within budgets.toml."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from tests.house.code import ROOT, Function, files, functions, name_of, source

BUDGETS: dict[str, Any] = tomllib.loads((ROOT / "budgets.toml").read_text(encoding="utf-8"))
FOLDERS = ("ridgeline", "scripts")


def limit(what: str, where: str) -> int:
    """The budget of `what` at `where`: an exception's, else the common one."""
    for entry in BUDGETS.get("except", []):
        if what in entry and fnmatchcase(where, entry["where"]):
            return int(entry[what])
    return int(BUDGETS["limits"][what])


def length(function: Function) -> int:
    """Lines from `def` to the end, without the docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= (first.end_lineno or 0) - first.lineno + 1
    return lines


def num_parameters(function: Function) -> int:
    spec = function.args
    names = [each.arg for each in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    return len(names) - (bool(names) and names[0] in ("self", "cls"))


def all_functions() -> Iterator[tuple[str, Function]]:
    for path in files(*FOLDERS):
        yield from functions(path)


def test_functions_are_short() -> None:
    too_long = [
        f"{where}: {length(node)} lines"
        for where, node in all_functions()
        if length(node) > limit("function_lines", where)
    ]
    assert not too_long, "\n".join(too_long)


def test_parameter_lists_are_short() -> None:
    too_many = [
        f"{where}: {num_parameters(node)} parameters"
        for where, node in all_functions()
        if num_parameters(node) > limit("parameters", where)
    ]
    assert not too_many, "\n".join(too_many)


def test_files_are_short() -> None:
    too_long = []
    for path in files(*FOLDERS):
        lines = source(path).num_lines
        if lines > limit("file_lines", name_of(path)):
            too_long.append(f"{name_of(path)}: {lines} lines")
    assert not too_long, "\n".join(too_long)


def test_every_exception_is_needed_and_explained() -> None:
    names = [where for where, _ in all_functions()] + [name_of(path) for path in files(*FOLDERS)]
    for entry in BUDGETS.get("except", []):
        assert len(entry.get("why", "")) > 10, entry
        assert any(fnmatchcase(name, entry["where"]) for name in names), entry
