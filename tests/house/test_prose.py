"""Prose is plain English: the packages listed here use no word that tests/house/prose.py bans."""

from __future__ import annotations

import pytest

from tests.house.prose import ROOT, check, offences, without_code

# Files and folders that are clean. Add yours when `python -m tests.house.prose YOURS` lists
# nothing.
CLEAN = [
    ".github",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "benchmarks",
    "docs",
    "mkdocs.yml",
    "native",
    "notes",
    "ridgeline/__init__.py",
    "ridgeline/api",
    "ridgeline/cli",
    "ridgeline/compress",
    "ridgeline/config",
    "ridgeline/diagnose",
    "ridgeline/engine",
    "ridgeline/errors.py",
    "ridgeline/fleet",
    "ridgeline/hardware",
    "ridgeline/http_replies.py",
    "ridgeline/hub",
    "ridgeline/measure",
    "ridgeline/modelspec",
    "ridgeline/operate",
    "ridgeline/optimize",
    "ridgeline/paths.py",
    "ridgeline/plan",
    "ridgeline/records",
    "ridgeline/report",
    "ridgeline/roofline.py",
    "ridgeline/routing",
    "ridgeline/serve",
    "ridgeline/stats.py",
    "ridgeline/techniques.toml",
    "ridgeline/twin",
    "ridgeline/workflows",
    "scripts",
    "tests/api",
    "tests/clients",
    "tests/cli",
    "tests/compress",
    "tests/conformance",
    "tests/diagnose",
    "tests/engine",
    "tests/examples",
    "tests/fleet",
    "tests/floor",
    "tests/gpu",
    "tests/hardware",
    "tests/hub",
    "tests/invariants",
    "tests/measure",
    "tests/modelspec",
    "tests/operate",
    "tests/optimize",
    "tests/plan",
    "tests/report",
    "tests/routing",
    "tests/serve",
    "tests/twin",
]


def test_clean_packages_stay_clean() -> None:
    found = check(*CLEAN)
    assert not found, "\n".join(map(str, found))


def test_listed_paths_exist() -> None:
    assert not [name for name in CLEAN if not (ROOT / name).exists()]


@pytest.mark.parametrize(
    "planted",
    [
        "# What the server was told of the client.",
        "def _told(text): ...",
        "Nobody reads it; somebody might, and whoever does is free to. Everybody waits.",
        "The bound beside each figure.",
        "what to mend, mended, mending",
        "a seat, two seats, seated",
        "promised latency",
        "class Weather: ...",
        "the courier's roster of errands",
        "measured anew",
        "so many times as fast",
        "a thread of its own",
        "builds of their own",
        "a thread of its own and a queue",
        "measured in turns, or by turns",
        "nothing to be had",
        "made of what is stored",
        "What is kept is read again.",
        "Read it. What was dropped; that is gone.",
        "See the head of this file for why.",
        '    """See `Wording`."""',
        '    """See `ridgeline.engine.sampling.base.Sampler`."""',
    ],
)
def test_planted_word_is_found(planted: str) -> None:
    assert list(offences(planted))


@pytest.mark.parametrize(
    "plain",
    [
        "besides, promising, recommended",
        "What is a block? A fixed number of token slots.",
        "What is continuous batching, and when does it help?",
        'tools=[{"name": "get_weather"}]',
        "As many requests as slots.",
        '    """See `x` for the layout; returns the number of bytes."""',
        "foretold",
        "return new Promise(done => Promise.resolve(done))",
        "at most 1 MiB of its own response",
    ],
)
def test_plain_english_passes(plain: str) -> None:
    assert not list(offences(plain))


def test_code_blocks_of_pages_are_not_prose() -> None:
    page = "text\n```console\n$ x\nwhat nobody told\n```\nmore told\n"
    assert [offence.line for offence in offences(without_code(page))] == [6]
