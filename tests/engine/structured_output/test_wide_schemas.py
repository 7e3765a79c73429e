"""A schema that is accepted works to its end; one that is too wide or deep is refused at once."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ridgeline.engine.engine import Engine
from ridgeline.engine.scheduler.plan import SamplePoint
from ridgeline.engine.structured_output.repeats import (
    MAX_COPIES,
    MAX_GROUP_COPIES,
    count_copies,
    count_group_copies,
)
from ridgeline.engine.structured_output.width import (
    MAX_DEPTH,
    MAX_PATTERNS,
    MAX_WIDTH,
    check_depth,
    check_width,
)
from ridgeline.errors import BadGrammar
from ridgeline.records import OutputGrammar, Sampling

TEXT = {"type": "string"}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open("demo", max_num_seqs=2, kv_cache_memory_bytes=16 << 20) as opened:
        yield opened


def record(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def optional(num: int, value: Any = TEXT, prefix: str = "field") -> dict[str, Any]:
    return record({f"{prefix}_{i}": value for i in range(num)})


def grammar(schema: Any) -> OutputGrammar:
    return OutputGrammar("json", json.dumps(schema))


def write(engine: Engine, kind: OutputGrammar, tokens: list[int]) -> None:
    """Compute the mask before each token, which has to be allowed."""
    engine._masks.prepare(kind)
    for place, token in enumerate(tokens):
        history = (9, *tokens[:place])
        point = SamplePoint(Sampling(structured=kind), 1, place, 1, history, ())
        masked_V = engine._masks.apply(torch.zeros(1, 4096), [point])[0]
        assert masked_V[token].isfinite(), (place, engine.tokenizer.decode(tokens[:place]))


def walk(engine: Engine, kind: OutputGrammar, rng: random.Random, num: int) -> None:
    """Write random allowed tokens, rather marks than letters; no mask may fail."""
    engine._masks.prepare(kind)
    marks, output = [engine.tokenizer.encode(mark)[-1] for mark in '":,{[}]'], list[int]()
    for place in range(num):
        point = SamplePoint(Sampling(structured=kind), 1, place, 1, (9, *output), ())
        allowed_V = engine._masks.apply(torch.zeros(1, 4096), [point])[0].isfinite()
        preferred = [mark for mark in marks if allowed_V[mark]]
        is_mark = preferred and rng.random() < 0.8
        choices = preferred if is_mark else allowed_V.nonzero().flatten().tolist()
        token = rng.choice(choices)
        if token in engine.resolved.spec.eos_token_ids:
            return
        output.append(token)


def test_answer_with_800_optional_fields_is_written_to_its_end(engine: Engine) -> None:
    answer = {"field_3": "a", "field_500": "b c", "field_799": "d"}
    tokens = engine.tokenizer.encode(json.dumps(answer))
    write(engine, grammar(optional(MAX_WIDTH)), list(tokens))


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (optional(MAX_WIDTH + 1), MAX_WIDTH + 1),
        ({"type": "array", "items": optional(3000)}, 3000),
        (record({"a": record({"b": optional(900)}, "b")}, "a"), 900),
        ({"anyOf": [optional(300, prefix=f"kind{i}") for i in range(3)]}, 900),
        ({"$defs": {"d": optional(500)}, "allOf": [{"$ref": "#/$defs/d"}, optional(400)]}, 900),
    ],
)
def test_too_many_optional_fields_at_one_place_are_refused_with_number_and_limit(
    engine: Engine, schema: Any, value: int
) -> None:
    with pytest.raises(BadGrammar) as caught:
        engine._masks.prepare(grammar(schema))
    said = str(caught.value)
    assert f"{value} optional properties may come next at one place; {MAX_WIDTH} are" in said
    assert "list some of them under required" in said


@pytest.mark.parametrize(
    ("schema", "width"),
    [
        (optional(5), 5),
        (record({f"f{i}": TEXT for i in range(9)}, "f4"), 4),
        (record({f"f{i}": TEXT for i in range(9)}, *(f"f{i}" for i in range(9))), 0),
        ({"anyOf": [optional(3), optional(4), TEXT]}, 7),
        ({"anyOf": [record({"k": {"const": f"{i}"}, **optional(4)["properties"]}, "k")
                    for i in range(9)]}, 4),  # each branch has another first field
        ({"anyOf": [{"$ref": "#/$defs/d"}, {"$ref": "#"}], "$defs": {"d": optional(6)}}, 6),
        ({"type": "object", "patternProperties": {"^a": TEXT, "^b": TEXT}}, 2),
        ({"$ref": "#/$defs/none"}, 0),
        ({"properties": {"properties": {"type": "string"}}, "required": 3}, 1),
        (True, 0),
    ],
)  # fmt: skip
def test_width_is_the_most_properties_that_may_come_next(schema: Any, width: int) -> None:
    assert check_width(schema).width == width


def test_unions_that_a_first_field_tells_apart_may_be_large(engine: Engine) -> None:
    kinds = [
        record({"kind": {"const": f"k{i}"}, **optional(30)["properties"]}, "kind")
        for i in range(60)
    ]
    tokens = engine.tokenizer.encode('{"kind": "k17", "field_3": "x", "field_29": "y"}')
    write(engine, grammar({"anyOf": kinds}), list(tokens))


@pytest.mark.parametrize("levels", [MAX_DEPTH + 2, 400, 20_000])
def test_schema_that_is_nested_too_deeply_is_refused_with_number_and_limit(
    engine: Engine, levels: int
) -> None:
    text = '{"items": ' * levels + "true" + "}" * levels
    with pytest.raises(BadGrammar, match=f"nested {levels} levels deep; {MAX_DEPTH} are allowed"):
        engine._masks.prepare(OutputGrammar("json", text))


def test_schema_of_a_tool_that_is_nested_too_deeply_is_refused(engine: Engine) -> None:
    schema = '{"items": ' * 5000 + "true" + "}" * 5000
    with pytest.raises(BadGrammar, match=f"nested more than {MAX_DEPTH} levels"):
        engine._masks.prepare(OutputGrammar("answer_or_calls", f"start: %call {schema}"))


def test_brackets_in_texts_are_no_levels() -> None:
    check_depth(json.dumps({"const": "[{" * 500 + '"\\'}))


def test_too_many_patterns_of_names_are_refused_before_they_are_compiled(engine: Engine) -> None:
    patterns = {f"^x{i}_": TEXT for i in range(MAX_PATTERNS + 1)}
    with pytest.raises(BadGrammar, match=f"101 patterns of property names.*{MAX_PATTERNS} are"):
        engine._masks.prepare(grammar({"type": "object", "patternProperties": patterns}))


@pytest.mark.parametrize(
    ("pattern", "copies"),
    [
        ("a{3}", 3),
        ("(a{3}b{2}){10}", 50),
        ("((ab){100}c){300}", 30_000),
        (r"[{}()]{5}\{7\}", 5),
        ("a{2,}b{,9}c*", 11),
        ("a)b{3}(", 3),
    ],
)
def test_copies_of_counted_repetitions(pattern: str, copies: int) -> None:
    assert count_copies(pattern) == copies


@pytest.mark.parametrize("kind", ["regex", "json"])
def test_too_many_copies_are_refused_with_number_and_limit(engine: Engine, kind: str) -> None:
    text = "(a{300}b){300}"
    text = json.dumps({"type": "string", "pattern": text}) if kind == "json" else text
    with pytest.raises(BadGrammar, match=f"90000 copies .*; {MAX_COPIES} are allowed"):
        engine._masks.prepare(OutputGrammar(kind, text))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "copies"),
    [
        ("(ab){4}", 6),
        ("a{4}[b-z]{4}", 0),
        ("((ab){100}c){199}", 39_996),
        ("(a{3}b{2}){10}", 18),
        ("(ab|c){2}x", 3),
        (r"\(ab){9000}", 0),
    ],
)
def test_characters_that_repeated_groups_add(pattern: str, copies: int) -> None:
    assert count_group_copies(pattern) == copies


@pytest.mark.parametrize("num_patterns", [1, 10])
def test_repeated_groups_of_patterns_are_bounded_together(
    engine: Engine, num_patterns: int
) -> None:
    """`(ab){19000}` was accepted, and failed in the middle of an answer after a mask of 31 ms."""
    pattern = f"^(ab){{{MAX_GROUP_COPIES // 2 // num_patterns + 2}}}$"
    parts = [{"type": "string", "pattern": f"{i}{pattern}"} for i in range(num_patterns)]
    with pytest.raises(BadGrammar, match=f"repeated groups; {MAX_GROUP_COPIES} are allowed"):
        engine._masks.prepare(OutputGrammar("json", json.dumps({"anyOf": parts})))


def random_schema(rng: random.Random, depth: int) -> Any:
    """A schema that is wide, deep, a large choice or a long pattern."""
    kinds: list[Callable[[], Any]] = [
        lambda: TEXT,
        lambda: {"type": "integer", "maximum": rng.randint(0, 10**6)},
        lambda: {"enum": [f"option {i}" for i in range(rng.choice((2, 30, 500)))]},
        lambda: {"type": "string", "pattern": f"^[a-z]{{1,{rng.choice((3, 200, 5000))}}}$"},
        lambda: {"type": "string", "maxLength": rng.choice((1, 100, 100_000))},
    ]
    if depth:
        num = rng.choice((1, 5, 40, 150))
        part = random_schema(rng, depth - 1)
        kinds += 2 * [
            lambda: optional(num, part),
            lambda: {"type": "array", "items": part, "minItems": rng.randint(0, 3)},
            lambda: {"anyOf": [part, {"type": "null"}, optional(num, TEXT, "other")]},
            lambda: record({"id": TEXT, "part": part, **optional(num)["properties"]}, "id"),
        ]
    return rng.choice(kinds)()


@pytest.mark.parametrize("seed", range(12))
def test_what_is_accepted_does_not_fail_in_the_middle(engine: Engine, seed: int) -> None:
    rng = random.Random(seed)
    try:
        walk(engine, grammar(random_schema(rng, 3)), rng, 50)
    except BadGrammar as error:
        assert "may come next at one place" in str(error)
