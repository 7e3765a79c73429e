"""Flags of the engine and the server: what they say, their value here, who speaks of them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ridgeline.cli.params.engine import HELP as ENGINE
from ridgeline.diagnose.conditions import written
from ridgeline.diagnose.rules.causes import shipped_causes
from ridgeline.optimize import ladder
from ridgeline.serve.config import HELP as SERVER
from ridgeline.serve.config import ServerOptions
from ridgeline.workflows.explain.topics import technique
from ridgeline.workflows.explain.topics.base import Known, Page


def names() -> Mapping[str, str]:
    """Every field that is a flag; the dashes before it may be left out."""
    return {name: name for name in (*SERVER, *ENGINE)}


def page(id: str, known: Known) -> Page:
    """The flag, with the techniques, rungs and causes that name it."""
    flag = "--" + id.replace("_", "-")
    own = _engine(id, known) if id in ENGINE else _server(id)
    techniques = [row for row in technique.rows().values() if _names(row["switch"], flag)]
    rungs = {rung.id for rung in ladder.load_default_ladder().rungs if id in _changed(rung)}
    causes = [each for each in shipped_causes() if _names(each.flag.get("ridgeline", ""), flag)]
    lines = (
        *own,
        *(("switches", f"{row['id']}: moves {row['term']}") for row in techniques),
        *(
            (each.verdict, f"{each.title}: {each.reason}")
            for each in known.told
            if each.rung in rungs
        ),
        *(("mends", f"{each.id} ({each.verdict}): {each.fix}") for each in causes),
        *(("asked", f"{each.question} {each.why}") for each in known.walked if flag in each.why),
    )
    return Page(kind="flag", id=id, title=flag, lines=lines)


def _engine(id: str, known: Known) -> tuple[tuple[str, str], ...]:
    value = written(id, known.facts) if id in known.facts else "not set"
    return (("is", ENGINE[id]), ("here", value), ("because", known.derivations.get(id, "default")))


def _server(id: str) -> tuple[tuple[str, str], ...]:
    fields = {field.name: field for field in msgspec.structs.fields(ServerOptions)}
    default = fields[id].default
    shown = "" if default in (None, "", msgspec.NODEFAULT) else str(default)
    return (("is", SERVER[id]), ("default", shown), ("of", "ridgeline serve"))


def _names(text: str, flag: str) -> bool:
    """Does the text name this flag (and not one that begins alike)?"""
    no = flag.replace("--", "--[no-]", 1)
    words = text.replace(",", " ").replace("(", " ").split()
    return flag in words or no in words


def _changed(rung: ladder.Rung) -> set[str]:
    return {*rung.changes, *(name for variant in rung.variants for name in variant)}
