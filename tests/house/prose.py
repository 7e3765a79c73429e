"""Words that this project does not write, and where they occur.

Ridgeline's names, comments, docstrings, help, errors and pages use the vocabulary of vLLM's and
OpenAI's documentation. The words below come from an older private dialect; each has a plainer
replacement. `python -m tests.house.prose PATH …` lists every occurrence under the given files and
folders.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {
    ".py", ".pyi", ".md", ".toml", ".html", ".css", ".js", ".yml", ".yaml",
    ".h", ".cpp", ".inc", ".c", ".txt", ".sh",
}  # fmt: skip


class Rule(NamedTuple):
    pattern: re.Pattern[str]
    hints: tuple[str, ...]  # lower-case substrings, one of which every match contains
    instead: str


def _word(word: str, instead: str, *, endings: str = "") -> Rule:
    """`word` by itself or between underscores, in any case, with one of the endings (`s|ed`)."""
    tail = f"(?:{endings})?" if endings else ""
    pattern = rf"(?<![a-z]){word}{tail}(?![a-z])"
    return Rule(re.compile(pattern, re.IGNORECASE), (word,), instead)


def _phrase(pattern: str, hint: str, instead: str) -> Rule:
    return Rule(re.compile(pattern, re.IGNORECASE), (hint,), instead)


RULES = (
    _word("told", "say what happened: reported, passed, notified, known"),
    _word("nobody", "no request, no client, nothing; or an active verb with a real subject"),
    _word("somebody", "a client, a request, another process"),
    _word("everybody", "every client, all requests"),
    _word("whoever", "the caller, the client, the thread that"),
    _word("beside", "next to, alongside, together with, in addition to"),
    _word("mend", "fix, repair, improve", endings="s|ed|ing"),
    _word("seat", "slot", endings="s|ed"),
    _word("promise", "SLO, limit, guarantee, prediction", endings="s|d"),
    _word("weather", "interference, noise"),
    _word("courier", "stream writer", endings="s"),
    _word("roster", "sequence registry", endings="s"),
    _word("errand", "stream, task", endings="s"),
    _word("anew", "again, from scratch"),
    _phrase(r"\bso many\b", "so many", "give the number: N tokens, that many"),
    _phrase(  # "a thread of its own", but not "of its own response"
        r"\bof (?:its|their|his|her) own\b(?=\W*$|\s*[^\w\s]"
        r"|\s+(?:and|or|but|that|which|with|in|on|at|for|to|of|is|are|by|as|so|then)\b)",
        "own",
        "separate, dedicated, or drop it",
    ),
    _phrase(r"(?<!turn )\b(?:by|in) turns\b", "turns", "alternately, interleaved"),
    _phrase(r"\bto be had\b", "to be had", "available, possible, reachable"),
    _phrase(
        r"\b(?:of|for|from|with|by|in|than|as|and|but|to|on|is|are|that)\s+what\s+(?:is|was|are|were|has|had)\b",
        "what",
        "name the thing instead of a clause opening with 'what is'",
    ),
    _phrase(
        r"(?:^|[.;!?]\s+)What\s+(?:is|was|are|were|has|had)\b(?=[^?.]{0,300}[.;])(?![^?.;]*\?)",
        "what",
        "name the subject of the sentence instead of opening it with 'What is'",
    ),
    _phrase(
        r"\bsee the (?:head|top) of (?:this|the) (?:file|module)\b",
        "see the",
        "say it here: a docstring stands alone",
    ),
    Rule(
        re.compile(r'"""\s*See\b[^".;]*(?:\.[^"\s;][^".;]*)*\.?\s*"""'),
        ('"""see',),
        "say what it does: a docstring that only points elsewhere is an empty tooltip",
    ),
)

ALLOWED = (
    re.compile(r"(?:get|current)_weather", re.IGNORECASE),  # OpenAI's example of a function call
    re.compile(r"\bPromise[.(<]"),  # JavaScript
    re.compile(r"\(was `\w+`\)"),  # an old name in the changelog
)


class Offence(NamedTuple):
    where: str
    line: int
    text: str
    instead: str

    def __str__(self) -> str:
        return f"{self.where}:{self.line}: {self.text!r} (instead: {self.instead})"


def offences(text: str, where: str = "") -> Iterator[Offence]:
    """Every banned word of `text`.

    Plain substring tests go first: they rule out most files at once.
    """
    lower = text.lower()
    for rule in RULES:
        if not any(hint in lower for hint in rule.hints):
            continue
        allowed = [found.span() for pattern in ALLOWED for found in pattern.finditer(text)]
        for match in rule.pattern.finditer(text):
            if not any(start <= match.start() < end for start, end in allowed):
                line = text.count("\n", 0, match.start()) + 1
                yield Offence(where, line, " ".join(match[0].split()), rule.instead)


def without_code(page: str) -> str:
    """A Markdown page with its fenced blocks, which quote output, blanked; lines stay in place."""
    return re.sub(
        r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), page, flags=re.M | re.S
    )


def files(*names: str) -> Iterator[Path]:
    """Text files under the named files and folders."""
    for name in names:
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in SUFFIXES and "__pycache__" not in file.parts:
                yield file


def check(*names: str) -> list[Offence]:
    found: list[Offence] = []
    for file in files(*names):
        text = file.read_text(encoding="utf-8")
        text = without_code(text) if file.suffix == ".md" else text
        found += offences(text, file.relative_to(ROOT).as_posix())
    return found


if __name__ == "__main__":
    listed = check(*(sys.argv[1:] or ["ridgeline"]))
    print("\n".join(map(str, listed)))
    sys.exit(bool(listed))
