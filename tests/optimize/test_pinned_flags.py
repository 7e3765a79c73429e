"""Every flag that a rung uses is one that the server takes, by its own source."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from ridgeline.optimize.external.drafter_rungs import drafter_flags
from ridgeline.optimize.external.server_flags import load_server_flags
from ridgeline.optimize.external.server_rungs import PARALLEL_FLAGS, server_rungs
from ridgeline.optimize.server_settings import FLAGS, REMOVE
from ridgeline.twin.servers.flag_table import flag_tables

PINNED = flag_tables()
OLDEST_TRTLLM = """
--backend --host --kv_cache_free_gpu_memory_fraction --max_batch_size --max_beam_width
--max_num_tokens --max_seq_len --port --pp_size --tokenizer --tp_size --trust_remote_code
"""
"""Flags in the documentation of TensorRT-LLM 0.18.2."""
FLAG = re.compile(r"(?:^|\s)(--?[A-Za-z][\w-]*)")


def flags_in(texts: object) -> Iterator[str]:
    if isinstance(texts, dict):
        for text in texts.values():
            yield from flags_in(text)
    else:
        yield from FLAG.findall(str(texts).removeprefix(REMOVE))


def used_flags(server: str) -> set[str]:
    """The flags of the shared rungs, of the server's own, and of parallelism."""
    tables = [
        changes.get(FLAGS, {})
        for rung in server_rungs(server)
        for changes in (rung.changes, *rung.variants)
    ]
    own = {flag.removeprefix(REMOVE) for table in tables for flag in table}
    parallel = {flag for flag in PARALLEL_FLAGS.get(server, ()) if flag is not None}
    own |= drafter_flags(server)
    return own | parallel | set(flags_in(load_server_flags()[server].flags))


@pytest.mark.parametrize("server", sorted(PINNED))
def test_server_takes_every_flag_of_its_rungs(server: str) -> None:
    unknown = used_flags(server) - set(PINNED[server].takes)
    assert not unknown, f"{server} {PINNED[server].version} has no {sorted(unknown)}"


@pytest.mark.parametrize("server", sorted(PINNED))
def test_other_spellings_stand_for_flags_of_the_server(server: str) -> None:
    known = PINNED[server].takes
    for short, long in load_server_flags()[server].aliases.items():
        assert long.partition("=")[0] in known, short
        if not short.startswith("-O"):  # which vLLM reads before its parser does
            assert len(PINNED[server].named(short)) == 1, short
        assert not long.count(" "), "one word for one word"


def test_rungs_of_trtllm_name_the_release_that_has_their_flags() -> None:
    """Flags that the oldest documented release lacks are said to need a newer one."""
    oldest = set(OLDEST_TRTLLM.split())
    for rung in server_rungs("trtllm"):
        for changes in (rung.changes, *rung.variants):
            for flag in changes.get(FLAGS, {}):
                release = PINNED["trtllm"].since.get(flag, "").partition(":")[0]
                assert flag in oldest or (release or "1.2") in rung.hurts_when, flag


def test_every_server_but_our_own_is_pinned() -> None:
    assert set(PINNED) == set(load_server_flags()) - {"ridgeline"}
