"""Compares the flags that `optimize` and twins know of a server with the server's own sources.

    PYTHONPATH=. python scripts/check_flags.py sglang WHEEL_OR_FOLDER

The sources are parsed, never run: `pip download --no-deps sglang` gets a wheel without installing
it. Flags are the names in calls of `add_argument`, the fields of argument dataclasses
(`chunked_prefill_size` is `--chunked-prefill-size`) and their `cli_name` and `aliases`. Reports
flags of the rungs that the server does not take (exit code 1), and pinned ones that are gone.
"""

from __future__ import annotations

import argparse
import ast
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tests.optimize.test_pinned_flags import PINNED, used_flags

SOURCES = {
    "sglang": r"sglang/srt/(server_args|arg_groups/.+)\.py",
    "vllm": r"vllm/(engine/arg_utils|entrypoints/(openai|launchers)/cli_args)\.py",
    "trtllm": r"tensorrt_llm/commands/serve\.py",
}
FLAG = re.compile(r"--?[A-Za-z][\w-]*")


def sources(place: Path, pattern: str) -> Iterator[str]:
    """The texts of the files of a wheel or folder whose path matches."""
    if place.is_file():
        with zipfile.ZipFile(place) as wheel:
            for name in wheel.namelist():
                if re.fullmatch(pattern, name):
                    yield wheel.read(name).decode()
        return
    for file in place.rglob("*.py"):
        if re.fullmatch(pattern, file.relative_to(place).as_posix()):
            yield file.read_text(encoding="utf-8")


def flags_of_source(text: str) -> Iterator[str]:
    """The flags that a module defines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            keywords = [k.value for k in node.keywords if k.arg in ("cli_name", "aliases")]
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            names = list(node.args) if called in ("add_argument", "option") else []
            for part in [inner for value in (*names, *keywords) for inner in ast.walk(value)]:
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield from (w for w in part.value.split("/") if FLAG.fullmatch(w))
        elif isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield "--" + field.target.id.replace("_", "-")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("server", choices=sorted(SOURCES))
    parser.add_argument("place", type=Path, help="wheel, or folder of sources")
    given = parser.parse_args()
    known = {
        flag
        for text in sources(given.place, SOURCES[given.server])
        for flag in flags_of_source(text)
    }
    if not known:
        print(f"{given.place} has no sources of {given.server}'s flags")
        return 2
    if PINNED[given.server].parser == "argparse":  # a boolean --x may also have --no-x
        known |= {flag.replace("--", "--no-", 1) for flag in known}
    unknown = sorted(used_flags(given.server) - known)
    table = PINNED[given.server]
    pinned = {flag for flag in table.takes if flag not in ("-h", "--help")}
    print(f"{given.server} ({given.place.name}): {len(known)} flags")
    print(f"used by a rung, but unknown: {' '.join(unknown) or 'none'}")
    new = sorted(flag for flag in known - pinned if not flag.startswith(("---", "--no-")))
    print(f"not pinned as of {table.version}: {' '.join(new) or 'none'}")
    gone = sorted(pinned - known)
    print(f"pinned as of {table.version}, but gone: {' '.join(gone) or 'none'}")
    return 1 if unknown else 0


if __name__ == "__main__":
    raise SystemExit(main())
