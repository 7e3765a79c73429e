"""The tree stays readable: small folders, no two folders that import each other, unique names."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.house import code
from tests.house.code import ROOT, files, imported_modules, module_of, name_of, source

MAX_FILES = 14  # Python files of one folder, __init__.py apart


def crowded_folders() -> list[str]:
    counts: dict[Path, int] = defaultdict(int)
    for path in files("ridgeline"):
        counts[path.parent] += path.name != "__init__.py"
    return sorted(f"{name_of(folder)}: {n}" for folder, n in counts.items() if n > MAX_FILES)


def mutual_imports() -> list[str]:
    """Pairs of folders, neither inside the other, of which each imports from the other."""
    folder_of = {
        module_of(path): module_of(path.parent / "__init__.py") for path in files("ridgeline")
    }
    edges: dict[tuple[str, str], str] = {}
    for path in files("ridgeline"):
        here = folder_of[module_of(path)]
        for module, line in imported_modules(path):
            there = folder_of[module]
            nested = f"{there}.".startswith(f"{here}.") or f"{here}.".startswith(f"{there}.")
            if not nested:
                edges.setdefault((here, there), f"{name_of(path)}:{line}")
    return [
        f"{a} <-> {b}: {edges[a, b]} and {edges[b, a]}"
        for a, b in sorted(edges)
        if a < b and (b, a) in edges
    ]


def import_circles() -> list[str]:
    """Modules that import each other, at the top or inside functions; types alone do not count."""
    graph = {
        module_of(path): {
            module
            for module, line in imported_modules(path)
            if line not in source(path).type_imports
        }
        - {module_of(path)}
        for path in files("ridgeline")
    }
    return sorted(" -> ".join(sorted(group)) for group in _circles(graph) if len(group) > 1)


def _circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected components (Kosaraju's algorithm, without recursion)."""
    order, seen = [], set()
    for root in graph:
        stack = [(root, iter(sorted(graph[root])))]
        if root in seen:
            continue
        seen.add(root)
        while stack:
            node, rest = stack[-1]
            following = next((n for n in rest if n in graph and n not in seen), None)
            if following is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(sorted(graph[following]))))
    backwards: dict[str, set[str]] = defaultdict(set)
    for node, targets in graph.items():
        for target in targets:
            backwards[target].add(node)
    groups, assigned = [], set()
    for root in reversed(order):
        if root in assigned:
            continue
        group, pending = set(), [root]
        while pending:
            node = pending.pop()
            if node not in assigned and node in graph:
                assigned.add(node)
                group.add(node)
                pending.extend(backwards[node])
        groups.append(group)
    return groups


def repeated_class_names() -> list[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for path in files("ridgeline"):
        for name, line in source(path).classes:
            places[name].append(f"{name_of(path)}:{line}")
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if where[1:]]


def test_no_folder_is_crowded() -> None:
    assert not crowded_folders(), "\n".join(crowded_folders())


def test_no_two_folders_import_each_other() -> None:
    assert not mutual_imports(), "\n".join(mutual_imports())


def test_no_modules_import_in_a_circle() -> None:
    assert not import_circles(), "\n".join(import_circles())


def test_class_names_are_unique() -> None:
    assert not repeated_class_names(), "\n".join(repeated_class_names())


def test_violations_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "a/one.py": "from ridgeline.b.two import Two\nclass One: ...\n",
        "b/two.py": "def f():\n    from ridgeline.a import one\nclass Two: ...\nclass One: ...\n",
        **{f"c/file{i}.py": "" for i in range(MAX_FILES + 1)},
    }.items():
        path = tmp_path / "ridgeline" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr("tests.house.code.ROOT", tmp_path)
    code._modules.cache_clear()
    try:
        assert crowded_folders() == [f"ridgeline/c: {MAX_FILES + 1}"]
        where = "ridgeline/a/one.py:1 and ridgeline/b/two.py:2"
        assert mutual_imports() == [f"ridgeline.a <-> ridgeline.b: {where}"]
        assert import_circles() == ["ridgeline.a.one -> ridgeline.b.two"]
        assert repeated_class_names() == ["One: ridgeline/a/one.py:2, ridgeline/b/two.py:4"]
    finally:
        code._modules.cache_clear()
    assert tmp_path != ROOT


def test_listed_slow_tests_exist() -> None:
    """An entry that names nothing would let its renamed test into the fast tier unseen."""
    missing = []
    for entry in (ROOT / "tests" / "slow_tests.txt").read_text("utf-8").splitlines():
        path, *names = entry.split("::")
        text = (ROOT / path).read_text("utf-8") if (ROOT / path).is_file() else None
        if text is None or any(not re.search(rf"(def|class) {name}\b", text) for name in names):
            missing.append(entry)
    assert not missing, "run `make slow-tests`, or take out of tests/slow_tests.txt: " + ", ".join(
        missing
    )
