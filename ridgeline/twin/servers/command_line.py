"""Reads the command line of another server into the fields that change its steps and memory."""

from __future__ import annotations

import contextlib
import json
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from typing import Any

import msgspec

from ridgeline.errors import DECODE_ERRORS, BadInput
from ridgeline.twin.config import NO_DRAFTER, TwinDrafter
from ridgeline.twin.servers.command_words import Given, SplitWords, split_words
from ridgeline.twin.servers.config_file import read_config_file, take_config_flags
from ridgeline.twin.servers.flag_numbers import read_number
from ridgeline.twin.servers.flag_table import FlagTable, flag_tables
from ridgeline.twin.servers.refusal import CommandRefused, unknown_words

HEADS = ("eagle", "mtp", "nextn")
DRAFT_MODELS = ("draft_model", "draft-simple", "standalone")
"""Parts of the names that servers give to methods of speculation."""


class ServerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A server's command line with its defaults filled in.

    `memory_share`: of the device. `graphs`: steps are replayed from captured graphs. `compiled`:
    kernels are compiled at the start. `overlapped`: the next step is scheduled while the device
    runs. `speculation`: as the flag gives it; `draft_model`: the checkpoint that drafts. Blocks
    evicted from the prefix cache go to host memory of `offload_gib`, or with `offloaded` to
    `offload_ratio` times the memory of the cache. `unknown`: flags without an effect on the twin.
    `unrecognized`: words that the server would refuse.
    """

    server: str
    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = None
    tp: int = 1
    dp: int = 1
    ep: int = 1
    expert_parallel: bool = False
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    memory_share: float = 0.9
    block_size: int = 16
    prefix_caching: bool = True
    chunked_prefill: bool = True
    graphs: bool = True
    compiled: bool = False
    graphs_of_attention: bool = True
    compile_level: int = 2
    overlapped: bool = True
    speculation: str = ""
    num_drafts: int = 0
    num_draft_steps: int = 0
    draft_model: str | None = None
    offload_gib: float = 0.0
    offload_ratio: float = 2.0
    offloaded: bool = False
    seed: int = 0
    unknown: tuple[str, ...] = ()
    unrecognized: tuple[str, ...] = ()

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens per step and sequence; 0 without speculation. Raises BadInput."""
        if self._is_document:
            return int(self._speculative_document.get("num_speculative_tokens", 3))
        if self.speculation and self.speculation.lower() != "none":
            return self.num_draft_steps or self.num_drafts or 4
        return self.num_drafts

    @property
    def drafter(self) -> TwinDrafter:
        """What drafts the tokens. Raises BadInput."""
        if not self.num_draft_tokens:
            return NO_DRAFTER
        checkpoint = self.draft_model
        method = self.speculation.lower()
        if self._is_document:
            document = self._speculative_document
            checkpoint = document.get("model")
            method = str(document.get("method", "ngram" if checkpoint is None else "draft_model"))
        if any(word in method for word in HEADS):
            return TwinDrafter("head")
        if any(word in method for word in DRAFT_MODELS):
            if not checkpoint:
                raise BadInput(f"{self.server}: speculation by a draft model names none")
            return TwinDrafter("model", checkpoint)
        return TwinDrafter("lookup")

    @property
    def _is_document(self) -> bool:
        return self.speculation.lstrip().startswith("{")

    @property
    def _speculative_document(self) -> dict[str, Any]:
        try:
            return msgspec.json.decode(self.speculation, type=dict[str, Any])
        except DECODE_ERRORS as error:
            raise BadInput(
                "the speculative config is not JSON", value=self.speculation, fix=str(error)
            ) from None


class ServerKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of servers.toml, which describes the fields."""

    name: str
    programs: tuple[str, ...]
    skip: tuple[str, ...]
    model: tuple[str, ...]
    defaults: dict[str, Any]
    flags: dict[str, str]
    switches: dict[str, dict[str, bool]] = {}
    metrics: dict[str, str] = {}
    pages: dict[str, dict[str, str]] = {}

    @property
    def table(self) -> FlagTable:
        """Every flag of the server."""
        return flag_tables()[self.name]

    def read(self, words: Sequence[str]) -> ServerLine:
        """The fields that the words after the program give. Raises BadInput.

        CommandRefused if a flag that the server has is used as it would not take it. Flags that it
        does not have are listed in the line.
        """
        from_file, from_words = self.split(words)
        values: dict[str, Any] = dict(self.defaults)
        without_effect: list[str] = []
        unrecognized = [*from_file.unrecognized, *from_words.unrecognized]
        for given in (from_file.given, from_words.given):  # a model in the words takes precedence
            fields, unused, stray = self._fields(given)
            values |= fields
            without_effect += unused
            unrecognized += stray
        if "model" not in values:
            values["model"] = self._model_among(unrecognized)
        if "config_file" in values:
            fields, unread = read_config_file(str(values.pop("config_file")))
            values |= fields
            without_effect += unread
        lists = {"unknown": without_effect, "unrecognized": unrecognized}
        return _line({**values, "server": self.name, **lists})

    def split(self, words: Sequence[str]) -> tuple[SplitWords, SplitWords]:
        """The flags of the words after the program: of their `--config` file, and their own."""
        words = words[1:] if words and words[0] in self.skip else words
        from_file, rest = take_config_flags(words, self.table)
        return split_words(self.table, from_file), split_words(self.table, rest)

    def _fields(self, split: Sequence[Given]) -> tuple[dict[str, Any], list[str], list[str]]:
        """Values by field, flags without an effect, and words too many."""
        values: dict[str, Any] = {}
        without_effect: list[str] = []
        stray: list[str] = []
        flags = [given.flag for given in split]
        is_named = self.model[0] == "" and not set(flags).isdisjoint(self.model[1:])
        for given in split:
            if not given.flag and (is_named or "" not in self.model or "model" in values):
                stray += given.values
            elif given.flag in self.switches:
                values |= self.switches[given.flag]
            elif given.flag in self.model:
                values["model"] = given.values[0]
            elif given.flag in self.flags and given.values:
                field = self.flags[given.flag]
                values[field] = self._value(given.flag, field, given.values[0])
            else:
                without_effect.append(given.flag)
        return values, without_effect, stray

    def _model_among(self, unrecognized: list[str]) -> str:
        """The word after an unknown flag where no other is the model; removed. Raises BadInput."""
        for place, word in enumerate(unrecognized):
            if "" in self.model and not word.startswith("-"):
                return unrecognized.pop(place)
        raise BadInput(f"the command line of {self.name} names no model")

    def _value(self, flag: str, field: str, value: str) -> str:
        kind = _TYPES.get(field)
        if kind is None or (field == "max_model_len" and value.lower() == "auto"):
            return value
        return read_number(self.table, flag, value, is_float=kind == "float")

    def refuse(self, line: ServerLine) -> CommandRefused:
        """What the server says of words that it does not know."""
        return unknown_words(self.table, line.unrecognized)


_TYPES = {
    field.name: "float" if field.type is float else "int"
    for field in msgspec.structs.fields(ServerLine)
    if field.type in (int, float, int | None)
}
"""Fields of a command line that are numbers."""


def _line(values: dict[str, Any]) -> ServerLine:
    if str(values.get("max_model_len", "")) in ("auto", "-1", "0"):
        del values["max_model_len"]
    if str(values.get("max_num_batched_tokens")) == "-1":  # SGLang: prompts are not split
        values |= {"chunked_prefill": False, "max_num_batched_tokens": 8192}
    if str(values.get("compile_level")) == "0":
        values |= {"graphs": False, "compiled": False}
    if str(values.get("compile_level")) == "1":
        values |= {"graphs_of_attention": False}
    try:
        return msgspec.convert(values, ServerLine, strict=False)
    except msgspec.ValidationError as error:
        raise BadInput(f"the server's command line: {error}") from None


@cache
def server_kinds() -> dict[str, ServerKind]:
    """Every server by name."""
    text = files("ridgeline.twin.servers").joinpath("servers.toml").read_text(encoding="utf-8")
    return {
        name: msgspec.convert({"name": name, **row}, ServerKind)
        for name, row in tomllib.loads(text).items()
    }


def programs() -> Iterator[str]:
    for kind in server_kinds().values():
        yield from kind.programs


def read_command(command: str) -> tuple[ServerKind, ServerLine]:
    """The server that a command line starts, and its fields. Raises BadInput."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadInput("the server's command line cannot be read", fix=str(error)) from None
    if len(words) > 2 and PurePath(words[0]).name.startswith("python") and words[1] == "-m":
        words = words[2:]
    for kind in server_kinds().values():
        if words and PurePath(words[0]).name in kind.programs:
            return kind, kind.read(words[1:])
    raise BadInput(
        "no twin of this server is known",
        value=words[0] if words else command,
        limit=", ".join(programs()),
        fix="for example: ridgeline twin vllm serve llama-3.1-8b --max-num-seqs 64",
    )


def find_command(command: str) -> tuple[ServerKind, ServerLine] | None:
    """The server that a command line starts behind wrappers such as `ridgeline twin`, `env` or
    `docker run`, and its fields; None if it names no known server or no model.
    """
    names = set(programs())
    words = [word for word in shlex.split(command) if word != "{flags}"]
    for place, word in enumerate(words):
        if PurePath(word).name not in names:
            continue
        rest = [part.replace("{port}", "8000") for part in words[place:]]
        with contextlib.suppress(BadInput):
            return read_command(shlex.join(rest))
    return None


def as_read(command: str) -> str:
    """A command line as its server reads it: with the flags of its `--config` file, flags by their
    full names, and each JSON flag as one object.

    One that names no known server, or that the server refuses, stays as it is.
    """
    kinds = {program: kind for kind in server_kinds().values() for program in kind.programs}
    words = [word for word in shlex.split(command) if word != "{flags}"]
    for place, word in enumerate(words, start=1):
        kind = kinds.get(PurePath(word).name)
        if kind is None:
            continue
        with contextlib.suppress(BadInput):
            read = words[:place]
            for part in kind.split(words[place:]):
                given = [word for each in part.given for word in (each.flag, *each.values) if word]
                read += [*given, *part.unrecognized]
            return shlex.join(read)
    return command


def document(kind: ServerKind, line: ServerLine, path: str) -> bytes:
    """The configuration document of a path, as JSON."""
    fields = {**msgspec.to_builtins(line), "no_prefix_caching": not line.prefix_caching}
    rows = {key: fields[text.strip("{}")] for key, text in kind.pages[path].items()}
    return json.dumps(rows).encode()
