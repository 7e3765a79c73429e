"""Masks of one step take a bounded time: rows wait, and what they sample stays the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ridgeline.engine.engine import Engine
from ridgeline.engine.structured_output import guidance
from ridgeline.engine.structured_output.guidance import GuidanceMasks
from ridgeline.engine.structured_output.heap import heap_bytes
from ridgeline.engine.structured_output.token_bits import is_allowed, new_words
from ridgeline.errors import BadInput
from ridgeline.records import OutputGrammar, Sampling

DATE = OutputGrammar("regex", r"(19|20)\d\d-(0[1-9]|1[0-2])-[0-3]\d")
WORD = OutputGrammar("regex", "[a-z]{3,9}")
PROMPT = "import os\n"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open("demo", max_num_seqs=8, kv_cache_memory_bytes=32 << 20) as engine:
        yield engine


def masks_of(engine: Engine) -> GuidanceMasks:
    assert isinstance(engine._masks, GuidanceMasks)
    return engine._masks


def answers(engine: Engine) -> list[Any]:
    """Grammars, some with several choices or prompt log-probabilities, and plain requests."""
    sampling = [
        Sampling(max_tokens=14, temperature=1.0, seed=1, structured=DATE, n=2),
        Sampling(max_tokens=14, temperature=0.0, structured=WORD, prompt_logprobs=1, logprobs=2),
        Sampling(max_tokens=8, temperature=1.0, seed=3),
        Sampling(max_tokens=14, temperature=1.0, seed=4, structured=WORD),
        Sampling(max_tokens=8, temperature=0.0, ignore_eos=True),
    ]
    done = engine.generate([PROMPT] * len(sampling), sampling)
    return [(answer.tokens, answer.logprobs) for own in done for answer in own.answers] + [
        own.prompt_logprobs for own in done
    ]


@pytest.mark.parametrize("cheap_s", [0.0, 60.0], ids=["no row is cheap", "every row is cheap"])
def test_rows_that_wait_sample_the_same_tokens(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, cheap_s: float
) -> None:
    """Cheap rows wait too: 63 of 0.9 ms would hold the engine's thread for 57 ms."""
    expected = answers(engine)
    late: list[int] = []
    real = GuidanceMasks.apply_in_time

    def counted(self: GuidanceMasks, *args: Any) -> Any:
        unmasked = real(self, *args)
        late.append(len(unmasked.late))
        return unmasked

    monkeypatch.setattr(GuidanceMasks, "apply_in_time", counted)
    monkeypatch.setattr(guidance, "STEP_S", 0.0)
    monkeypatch.setattr(guidance, "CHEAP_S", cheap_s)
    assert answers(engine) == expected
    assert max(late) >= 2, "one row a step"


def test_long_output_is_consumed_over_several_steps(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = Sampling(max_tokens=12, temperature=1.0, seed=4, structured=DATE)
    (expected,) = engine.generate([PROMPT], sampling)
    monkeypatch.setattr(guidance, "STEP_S", 0.0)
    monkeypatch.setattr(guidance, "CONSUMED_AT_ONCE", 1)
    real, num = GuidanceMasks._state_for, 0

    def forgetful(self: GuidanceMasks, key: Any, output: Any, **given: Any) -> Any:
        nonlocal num
        num += 1
        if num == 6:
            self._states.pop(key, None)
        return real(self, key, output, **given)

    monkeypatch.setattr(GuidanceMasks, "_state_for", forgetful)
    (found,) = engine.generate([PROMPT], sampling)
    assert found.tokens == expected.tokens
    assert num > len(found.tokens) + 2, "the whole answer was not consumed in one step"


def test_exhausted_lexer_is_compiled_again_on_another_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = engine.generate([PROMPT], Sampling(max_tokens=12, structured=WORD, seed=2))
    masks = masks_of(engine)
    real_mask, real_compile = guidance._MatcherState._write, masks._compile
    threads: list[str] = []

    def exhausted(self: Any, words_W: Any) -> None:
        if not self.has_own_lexer and len(self.consumed) == 1:
            raise BadInput("too many lexer states")
        real_mask(self, words_W)

    def compile_noted(structured: OutputGrammar) -> Any:
        threads.append(threading.current_thread().name)
        return real_compile(structured)

    monkeypatch.setattr(guidance._MatcherState, "_write", exhausted)
    monkeypatch.setattr(masks, "_compile", compile_noted)
    (found,) = engine.generate([PROMPT], Sampling(max_tokens=12, structured=WORD, seed=2))
    assert found.tokens == expected.tokens
    assert threads and all(name.startswith("ridgeline-grammar") for name in threads), threads


def test_row_that_fails_leaves_the_step_of_others_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = guidance._MatcherState._write

    def fails(self: Any, words_W: Any) -> None:
        if self._structured is DATE and len(self.consumed) == 2:
            raise BadInput("the grammar is too complex")
        real(self, words_W)

    monkeypatch.setattr(guidance._MatcherState, "_write", fails)
    one_by_one: list[object] = []
    monkeypatch.setattr(engine._loop, "_run_one_by_one", one_by_one.append)
    plain = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
    events = engine.iterate(PROMPT, Sampling(max_tokens=12, structured=DATE))
    thread = threading.Thread(target=engine.generate, args=([PROMPT] * 3, plain))
    thread.start()
    *_, last = events
    thread.join()
    assert "the grammar is too complex" in str(getattr(last, "error", ""))
    assert not one_by_one and engine.is_healthy()


def test_lexers_of_their_own_are_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "MAX_OWN_LEXERS", 2)
    masks = masks_of(engine)
    keys = [(WORD, seed, 0) for seed in range(5)]
    for key in keys:
        masks._states[key] = masks._own_state(key, can_wait=False)
        masks._limit_own_lexers()
    assert [key for key in keys if key in masks._states] == keys[3:]
    assert not masks._jobs


def test_ambiguous_grammars_end_soon_however_many_run(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many hostile rows as slots: each fails within a few dozen tokens, none compiles again."""
    hostile = [
        OutputGrammar("grammar", f"start: s{i}\ns{i}: s{i} s{i} | /[a-z ]/") for i in range(8)
    ]
    compiled: list[OutputGrammar] = []
    real = GuidanceMasks._compile

    def counted(self: GuidanceMasks, structured: OutputGrammar) -> Any:
        compiled.append(structured)
        return real(self, structured)

    monkeypatch.setattr(GuidanceMasks, "_compile", counted)
    sampling = [
        Sampling(max_tokens=64, temperature=1.0, seed=seed, structured=grammar)
        for seed, grammar in enumerate(hostile)
    ]

    async def last_events() -> list[Any]:
        async def last(own: Sampling) -> Any:
            return [event async for event in engine.stream(PROMPT, own)][-1]

        return list(await asyncio.gather(*map(last, sampling)))

    began_s = time.process_time()
    errors = [str(getattr(event, "error", event)) for event in asyncio.run(last_events())]
    assert sum("items" in error for error in errors) >= 6, errors  # an answer may end before
    assert len(compiled) == len(hostile)
    assert time.process_time() - began_s < 20  # it takes 2; two such rows took 25 without a bound


def test_memory_of_compiled_grammars_is_bounded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that have ended keep no more of their grammars than the bound."""
    monkeypatch.setattr(guidance, "MAX_KEPT_BYTES", 16 << 20)
    grammars = [OutputGrammar("regex", f"a{{{19_900 + i}}}") for i in range(6)]  # 8 MB each
    engine.generate([PROMPT], Sampling(max_tokens=1, structured=grammars[0], seed=1))
    before = heap_bytes()
    if before is None:
        pytest.skip("this C library does not tell what it has handed out")
    for grammar in grammars:
        engine.generate([PROMPT], Sampling(max_tokens=1, structured=grammar, seed=1))
    after = heap_bytes()
    assert after is not None and after - before < 32 << 20
    masks = masks_of(engine)
    assert grammars[-1] in masks._compiled and grammars[1] not in masks._compiled
    assert not any(key[0] == grammars[1] for key in masks._states)


def test_grammar_that_several_requests_bring_at_once_is_compiled_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks, compiled = masks_of(engine), list[OutputGrammar]()
    real = masks._compile

    def counted(structured: OutputGrammar) -> Any:
        compiled.append(structured)
        return real(structured)

    monkeypatch.setattr(masks, "_compile", counted)
    grammar = OutputGrammar("regex", "b{5000}")
    threads = [threading.Thread(target=masks.prepare, args=(grammar,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == [grammar]


def test_rows_beyond_the_jobs_wait_and_jobs_of_rows_that_left_are_dropped(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guidance, "MAX_JOBS", 2)
    monkeypatch.setattr(guidance, "STALE_STEPS", 3)
    masks = masks_of(engine)
    begin = threading.Event()

    def waits(structured: OutputGrammar) -> Any:
        begin.wait(10)
        return guidance._CompiledGrammar(None, 0)  # type: ignore[arg-type]  # no mask is computed

    monkeypatch.setattr(masks, "_compile", waits)
    left, other, waiting = ((WORD, seed, 1) for seed in range(3))
    try:
        for key in (left, other, waiting):
            with pytest.raises(guidance._NotYetError):
                masks._own_state(key, can_wait=True)
        assert list(masks._jobs) == [left, other]
        masks._step += 4
        masks._jobs[other].asked_in_step = masks._step
        with pytest.raises(guidance._NotYetError):
            masks._own_state(waiting, can_wait=True)
        assert list(masks._jobs) == [other, waiting]
    finally:
        begin.set()
    for key in (other, waiting):
        assert masks._own_state(key, can_wait=False).has_own_lexer
    assert not masks._jobs


def repeated(pattern: str, kind: str) -> OutputGrammar:
    if kind == "json":
        schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}}
        return OutputGrammar("json", json.dumps(schema))
    return (
        OutputGrammar("grammar", f"start: /{pattern}/")
        if kind == "grammar"
        else OutputGrammar("regex", pattern)
    )


@pytest.mark.parametrize("kind", ["regex", "grammar", "json"])
def test_too_many_repetitions_are_refused_before_they_are_compiled(
    engine: Engine, kind: str
) -> None:
    began_s = time.process_time()
    with pytest.raises(BadInput, match="repetitions; 2000 are allowed"):
        masks_of(engine).prepare(repeated("a*" * 30_000, kind))
    assert time.process_time() - began_s < 2  # it took 9


@pytest.mark.parametrize("num", [300, 1000, 2000])
def test_masks_of_many_repetitions_take_a_bounded_time(engine: Engine, num: int) -> None:
    """One mask of 5,000 took 0.2 s of CPU time, in which no other request got a token."""
    compiled = masks_of(engine)._compile(repeated("a*" * num, "regex"))
    state = guidance._MatcherState(WORD, compiled.matcher.deep_copy(), [])
    output: list[int] = []
    words_W = new_words(1, engine.resolved.spec.vocab_size)[0]
    began_s = time.thread_time()
    with contextlib.suppress(BadInput):  # the answer ends there; those of others go on
        for _ in range(3):
            state.write_mask(words_W, output, time.thread_time() + 60)
            output.append(max(token for token in range(200) if is_allowed(words_W, token)))
    assert time.thread_time() - began_s < 0.1
