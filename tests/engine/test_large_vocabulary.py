"""Grammars over 128,000 tokens: what people send compiles, what is hostile costs little."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from ridgeline.engine.engine import Engine
from ridgeline.engine.structured_output import make_masks
from ridgeline.engine.structured_output.guidance import GuidanceMasks
from ridgeline.errors import BadInput
from ridgeline.modelspec.checkpoints.locate import model_path
from ridgeline.records import OutputGrammar

pytestmark = pytest.mark.slow

VOCAB = 128_000
NUM_MASKS = 24


def large_tokenizer() -> str:
    """The demo model's tokenizer with random pieces added, as the JSON of the library."""
    rng = random.Random(0)
    document = json.loads((model_path("demo") / "tokenizer.json").read_text(encoding="utf-8"))
    pieces = document["model"]["vocab"]
    parts = [piece for piece in pieces if piece.isascii() and 2 <= len(piece) <= 8]
    used = {*pieces.values(), *(token["id"] for token in document["added_tokens"])}
    free = iter(sorted(set(range(VOCAB)) - used))
    for token in free:
        piece = "".join(rng.choices(parts, k=rng.choice((2, 3))))
        while piece in pieces:
            piece += rng.choice(parts)
        pieces[piece] = token
    return json.dumps(document)


@pytest.fixture(scope="module")
def masks() -> GuidanceMasks:
    opened = make_masks(large_tokenizer, VOCAB, [0])
    opened.warm_up()
    assert isinstance(opened, GuidanceMasks)
    return opened


def tool(number: int) -> dict[str, Any]:
    """A function with ten parameters of the usual kinds."""
    kinds: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "integer", "minimum": 0, "maximum": 1000},
        {"type": "boolean"},
        {"type": "array", "items": {"type": "string"}, "maxItems": 10},
        {"enum": [f"option_{number}_{i}" for i in range(12)]},
        {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        {"type": "string", "pattern": "^[a-z]{2,8}-[0-9]+$"},
        {"type": ["string", "null"], "format": "date-time"},
    ]
    arguments = {
        "type": "object",
        "properties": {f"parameter_{i}": kinds[(number + i) % len(kinds)] for i in range(10)},
        "required": [f"parameter_{i}" for i in range(5)],
        "additionalProperties": False,
    }
    fields = {"name": {"const": f"tool_{number}"}, "arguments": arguments}
    return {"type": "object", "properties": fields, "required": list(fields)}


def schema(document: dict[str, Any]) -> OutputGrammar:
    return OutputGrammar("json", json.dumps(document))


def cpu_s(call: Callable[[], Any]) -> float:
    """Of this thread, which other processes hardly change."""
    began_s = time.thread_time()
    call()
    return time.thread_time() - began_s


def mask_times(masks: GuidanceMasks, grammar: OutputGrammar) -> list[float]:
    """CPU seconds of masks along a random answer, until it ends or reaches a limit."""
    rng, times = random.Random(0), []
    matcher = masks._compiled[grammar].matcher.deep_copy()
    for _ in range(NUM_MASKS):
        times.append(cpu_s(matcher.compute_logit_bias))
        bias = b"" if matcher.is_error() else matcher.compute_logit_bias()
        allowed = [token for token, kept in enumerate(bias) if kept]
        if not allowed or not matcher.consume_token(rng.choice(allowed)):
            break
    return times


def test_thirty_tools_compile_and_their_masks_are_cheap(masks: GuidanceMasks) -> None:
    grammar = schema({"anyOf": [tool(number) for number in range(30)]})
    assert cpu_s(lambda: masks.prepare(grammar)) < 0.25  # 0.03 s
    times = mask_times(masks, grammar)
    assert len(times) > 8 and max(times) < 0.01  # 0.5 ms


@pytest.mark.parametrize(
    "grammar",
    [
        OutputGrammar("grammar", "start: s\ns: s s | /[a-z ]/"),
        OutputGrammar("regex", "a*" * 2000),
        OutputGrammar("regex", "a{59000}"),
        OutputGrammar("regex", "(.*a){200}"),
        OutputGrammar("regex", "([a-z]+ ){3,900}x"),
        schema({"properties": {f"f{i}": {"type": "string"} for i in range(2200)}}),
    ],
    ids=lambda grammar: grammar.text[:20],
)
def test_hostile_grammars_stay_within_their_budget(
    masks: GuidanceMasks, grammar: OutputGrammar
) -> None:
    """A mask over twice as many tokens took 15 ms at most, and compilation 0.5 s."""

    def prepare() -> None:
        try:
            masks.prepare(grammar)
        except BadInput:
            pass
        else:
            assert max(mask_times(masks, grammar)) < 0.05

    assert cpu_s(prepare) < 2


def test_first_grammar_does_not_stop_other_threads(masks: GuidanceMasks) -> None:
    """Building the trie keeps Python's lock for a second, which is why `warm_up` does it."""
    beats: list[float] = []
    stop = threading.Event()

    def beat() -> None:
        while not stop.is_set():
            began_s = time.perf_counter()
            time.sleep(0.001)
            beats.append(time.perf_counter() - began_s)

    thread = threading.Thread(target=beat)
    thread.start()
    trie = masks._tokenizer
    masks.prepare(schema({"anyOf": [tool(number) for number in range(40)]}))
    stop.set()
    thread.join()
    assert masks._tokenizer is trie is not None, "the trie is built before requests are served"
    assert max(beats) < 0.3


@pytest.mark.parametrize(("num_tokens", "is_warm"), [(10_000, False), (10_001, True)])
def test_engine_with_a_large_vocabulary_opens_with_its_trie(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, is_warm: bool
) -> None:
    opened = mock.Mock(**{"resolved.spec.vocab_size": num_tokens})
    monkeypatch.setattr(Engine, "from_settings", lambda _settings: opened)
    Engine.open("demo")
    assert opened.warm_up_grammars.called is is_warm
