"""The README and docs tell the truth: links lead somewhere, commands exist, code runs."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from ridgeline.cli.main import main
from ridgeline.modelspec.families.registry import FAMILIES
from ridgeline.modelspec.families.wrappers import WRAPPERS
from scripts.draw_peers import PICTURE, draw
from scripts.generate_pages import stale as outdated_pages
from scripts.render_results import MARKED, RESULTS, stale
from tests.house.code import ROOT

SITE = sorted((ROOT / "docs").glob("**/*.md"))
ROOT_PAGES = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
]
PAGES = [*ROOT_PAGES, *SITE]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, body in FENCE.findall(page.read_text(encoding="utf-8")):
        if language in languages:
            yield body


def commands() -> Iterator[list[str]]:
    """Words of every command line shown: `$ …` in console blocks, every line of sh blocks."""
    for page in PAGES:
        for body in blocks(page, "sh", "console"):
            for line in body.replace("\\\n", " ").splitlines():
                command = line.removeprefix("$ ")
                if line.startswith("$ ") or (body in list(blocks(page, "sh")) and line.strip()):
                    yield shlex.split(command, comments=True)


def parsed(program: str) -> list[list[str]]:
    found = [words[1:] for words in commands() if words and Path(words[0]).name == program]
    return [[word for word in words if word not in ("&", "|")] for words in found]


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target.partition("#")[0]).exists():
                broken.append(f"{page.name}: {target}")
    assert not broken, "\n".join(broken)


def navigation(entry: Any) -> Iterator[str]:
    """Every page of a part of mkdocs.yml's `nav`."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from navigation(part)


def test_every_page_is_in_the_navigation() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = sorted(navigation(site["nav"]))
    assert named == sorted(page.relative_to(ROOT / "docs").as_posix() for page in SITE)


def test_the_site_loads_nothing_from_the_network() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    site = yaml.safe_load(text)
    assert site["theme"]["font"] is False and site["strict"] is True
    assert "://" not in re.sub(r"#.*", "", text)
    for name in site["extra"]["polyfills"]:
        assert (ROOT / "docs" / name).is_file()


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    shown = {word for words in parsed("make") for word in words}
    assert {"demo", "test"} <= shown
    for target in shown:
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"no target {target}"


@cache
def help_of(*words: str) -> str:
    """The help of the program, or of a command with all its flags; empty if there is none."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
        code = main([*words, "--help-all" if words else "--help"])
    return "" if code else text.getvalue()


def flags_of(*command: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z0-9-]*", help_of(*command)))


def test_commands_and_flags_exist() -> None:
    shown = parsed("ridgeline")
    assert len(shown) >= 5
    for words in shown:
        flags = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
        assert help_of(words[0]), f"no command {words[0]}"
        known = flags_of(words[0])
        if words[:2] == ["explain", "predict"]:  # which takes the options of predict
            known |= flags_of("predict")
        assert not flags - known, f"{words[0]} has no {flags - known}"


FOREIGN_FLAGS = {
    "--cache-prompt",
    "--no-cache-prompt",
    "--rm",
    "--link",
    "--volumes-from",
    "--tmpfs",
    "--sysctl",
    "--local",
    "--cuda-graph-trace",
    "--enforce-eager",
    "--parallel",
    "--threads",
}  # of other programs


def test_mentioned_flags_exist() -> None:
    """`--flag` in the text of a guide is a flag of some command."""
    commands = re.findall(r"^ {2}([a-z][a-z-]+) ", help_of(), re.MULTILINE)
    known = FOREIGN_FLAGS.union(flags_of(), *map(flags_of, commands))
    unknown = []
    for page in [ROOT / "README.md", *SITE]:
        if page.parent.name in ("guides", "quantise", "get-started", "concepts", "docs"):
            text = FENCE.sub("", MARKED.sub("", page.read_text(encoding="utf-8")))
            for code in re.findall(r"`([^`]+)`", text):
                if not code.startswith(("python ", "pip ", "scripts/", "ncu ", "nsys ")):
                    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", code))
                    unknown += [f"{page.name}: {flag}" for flag in flags - known]
    assert not unknown, "\n".join(unknown)


WITH_PYTHON = [page for page in PAGES if any(blocks(page, "python"))]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_python_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess
    import sys

    for code in blocks(page, "python"):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{code}\n{done.stderr}"


def test_request_fields_are_documented() -> None:
    from ridgeline.serve.openai.schemas import REFUSED, ChatCompletionRequest, CompletionRequest

    page = (ROOT / "docs" / "reference" / "request-fields.md").read_text(encoding="utf-8")
    fields = {*REFUSED, *CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
    assert not [name for name in sorted(fields) if f"`{name}`" not in page]


MENTIONED = re.compile(r"`((?:ridgeline|native|tests|benchmarks|scripts|docs)/[\w./-]+)`")


def test_mentioned_files_exist() -> None:
    texts = [*PAGES, ROOT / "ridgeline" / "techniques.toml"]
    missing = [
        f"{page.name}: {path}"
        for page in texts
        for path in MENTIONED.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / path).exists()
    ]
    assert not missing, "\n".join(missing)


def test_tables_are_those_of_the_results() -> None:
    assert not stale(), "run: python scripts/render_results.py"


def test_picture_is_that_of_the_results() -> None:
    assert PICTURE.read_text(encoding="utf-8") == draw(), "run: python scripts/draw_peers.py"


def test_families_are_counted_right() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"| {len(FAMILIES)}, and the text of {len(WRAPPERS)} image models (" in readme


def test_generated_pages_are_current() -> None:
    assert not outdated_pages(), "run: python -m scripts.generate_pages"


def test_every_result_is_shown() -> None:
    shown = {name for page in PAGES for name in MARKED.findall(page.read_text(encoding="utf-8"))}
    assert {path.stem for path in RESULTS.glob("*.json")} == {name for _, name, _ in shown}
