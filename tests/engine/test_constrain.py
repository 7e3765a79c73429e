"""Structured output: every answer matches its grammar, whatever it is batched with."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator

import pytest
import torch

from ridgeline.engine.engine import Engine
from ridgeline.engine.scheduler.plan import SamplePoint
from ridgeline.engine.structured_output import guidance, make_masks, token_bits
from ridgeline.engine.structured_output.guidance import GuidanceMasks
from ridgeline.errors import BadInput, CannotRun
from ridgeline.records import OutputGrammar, Sampling

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["new", "old"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
JSON = OutputGrammar("json", json.dumps(SCHEMA))
DATE = OutputGrammar("regex", r"(19|20)\d\d-(0[1-9]|1[0-2])-[0-3]\d")
CHOICE = OutputGrammar("choice", '["yes", "no", "may\\"be"]')
SUM = OutputGrammar("grammar", 'start: NUM ("+" NUM){1,3}\nNUM: /[0-9]{1,3}/')
PROMPT = "import os\n"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open("demo", max_num_seqs=8, kv_cache_memory_bytes=32 << 20) as engine:
        yield engine


@pytest.mark.slow
def test_every_answer_of_a_mixed_batch_matches_its_grammar(engine: Engine) -> None:
    kinds = [JSON, DATE, CHOICE, SUM, None]
    sampling = [
        Sampling(max_tokens=100, temperature=1.0, seed=seed, structured=kind, n=2)
        for seed in range(2)
        for kind in kinds
    ]
    done = engine.generate([PROMPT] * len(sampling), sampling)
    for asked, completion in zip(sampling, done, strict=True):
        for answer in completion.answers:
            if asked.structured is not None:
                assert answer.finish_reason == "stop", answer
            _check(asked.structured, answer.text)


def _check(kind: OutputGrammar | None, text: str) -> None:
    if kind is JSON:
        value = json.loads(text)
        assert list(value) == ["name", "size", "kind"] and value["kind"] in ("new", "old")
        assert 0 <= value["size"] <= 99 and len(value["name"]) <= 8
    elif kind is DATE:
        assert re.fullmatch(DATE.text, text)
    elif kind is CHOICE:
        assert text in json.loads(CHOICE.text)
    elif kind is SUM:
        assert re.fullmatch(r"\d{1,3}(\+\d{1,3}){1,3}", text)


CALLS = OutputGrammar(
    "json",
    json.dumps(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {
                            "name": {"const": "look"},
                            "parameters": {
                                "type": "object",
                                "properties": {"at": {"type": "object"}, "days": {"type": "array"}},
                                "required": ["at", "days"],
                                "additionalProperties": False,
                            },
                        },
                        "required": ["name", "parameters"],
                        "additionalProperties": False,
                    }
                ]
            },
        }
    ),
)
CALLED = [{"name": "look", "parameters": {"at": {"deep": {"er": [1, {"x": "y"}]}}, "days": [1, 2]}}]


def accepts(engine: Engine, wanted: OutputGrammar, text: str) -> bool:
    """Whether the grammar lets a model write exactly this text."""
    engine._masks.prepare(wanted)
    masks = engine._masks
    assert isinstance(masks, GuidanceMasks)
    matcher = masks._compiled[wanted].matcher.deep_copy()
    tokens = engine.tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    "written",
    [
        json.dumps(CALLED, separators=(",", ":")),
        json.dumps(CALLED),
        json.dumps(CALLED, indent=2),
        json.dumps(CALLED, indent=4),
        json.dumps(CALLED, indent="\t"),
        json.dumps(CALLED, indent=8),
        json.dumps(CALLED, indent=4).replace("\n", "\r\n"),
        json.dumps(CALLED, separators=(" ,  ", " : ")),
    ],
)
def test_json_may_contain_line_breaks_and_indentation(engine: Engine, written: str) -> None:
    assert accepts(engine, CALLS, written)


@pytest.mark.parametrize("blanks", ["\n\n", "   ", "\n" + " " * 65, "\n \n", "\v", "\u00a0"])
def test_whitespace_is_bounded(engine: Engine, blanks: str) -> None:
    written = json.dumps(CALLED).replace('": ', f'":{blanks}', 1)
    assert not accepts(engine, CALLS, written)


def test_unconstrained_requests_in_the_batch_are_unaffected(engine: Engine) -> None:
    greedy = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)
    alone = engine.generate([PROMPT], greedy)[0].tokens
    structured = Sampling(max_tokens=40, temperature=0.0, structured=JSON)
    together = engine.generate([PROMPT] * 4, [greedy, structured, greedy, structured])
    assert together[0].tokens == together[2].tokens == alone
    assert together[1].tokens == together[3].tokens
    assert together[1].tokens == engine.generate([PROMPT], structured)[0].tokens


@pytest.mark.slow
def test_answer_is_the_same_after_preemption() -> None:
    asked = [
        Sampling(max_tokens=60, temperature=1.2, seed=seed, structured=JSON) for seed in range(4)
    ]
    with Engine.open("demo", max_num_seqs=4, kv_cache_memory_bytes=32 << 20) as roomy:
        wanted = [each.tokens for each in roomy.generate([PROMPT] * 4, asked)]
        block = roomy.info.kv_bytes_per_token * roomy.info.block_size
    with Engine.open(
        "demo", max_model_len=96, max_num_seqs=4, kv_cache_memory_bytes=8 * block
    ) as tight:
        assert [each.tokens for each in tight.generate([PROMPT] * 4, asked)] == wanted
        assert tight.counters()["num_preemptions"] > 0


@pytest.mark.parametrize(
    "bad",
    [
        OutputGrammar("regex", "(["),
        OutputGrammar("json", '{"type": "nonsense"}'),
        OutputGrammar("json", "[" * 2000),
        OutputGrammar("json", "not json"),
        OutputGrammar("choice", "[]"),
        OutputGrammar("choice", json.dumps([str(i) for i in range(5000)])),
        OutputGrammar("grammar", "start: other"),
        OutputGrammar("regex", "a" * (1 << 20)),
        OutputGrammar("regex", "(" * 300 + "a" + ")" * 300),
        OutputGrammar("json", '{"$ref": "#"}'),
    ],
)
def test_grammar_that_cannot_be_compiled_rejects_only_its_request(
    engine: Engine, bad: OutputGrammar
) -> None:
    with pytest.raises(BadInput) as caught:
        engine.generate([PROMPT], Sampling(structured=bad))
    assert len(str(caught.value)) < 800
    assert engine.is_healthy()


def test_one_of_is_exact_or_rejected(engine: Engine) -> None:
    """Branches that share a value cannot be distinguished while the answer is written."""
    shared = [{"type": "integer"}, {"type": "number"}]
    with pytest.raises(BadInput, match="use anyOf"):
        engine._masks.prepare(OutputGrammar("json", json.dumps({"oneOf": shared})))
    apart = OutputGrammar("json", json.dumps({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}))
    assert accepts(engine, apart, "12") and accepts(engine, apart, "true")


def test_schema_cannot_reference_anything_outside(engine: Engine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/schema.json"
        with pytest.raises(BadInput):
            schema = OutputGrammar("json", json.dumps({"$ref": url}))
            engine.generate([PROMPT], Sampling(structured=schema))
        with pytest.raises(TimeoutError):
            listener.accept()


def test_allowed_token_ids_restrict_the_output(engine: Engine) -> None:
    allowed = Sampling(max_tokens=12, temperature=1.0, seed=3, allowed_token_ids=(5, 7, 11))
    tokens = engine.generate([PROMPT], allowed)[0].tokens
    assert set(tokens) <= {5, 7, 11} and len(set(tokens)) > 1
    with pytest.raises(BadInput, match="allowed_token_ids"):
        engine.generate([PROMPT], Sampling(allowed_token_ids=(10**6,)))


def test_grammars_need_a_tokenizer() -> None:
    masks = make_masks(None, 8, [0])
    with pytest.raises(CannotRun, match="no tokenizer"):
        masks.prepare(DATE)
    logits_SV = torch.zeros(2, 8)
    spots = [
        SamplePoint(Sampling(allowed_token_ids=(1, 2)), 0, 0, 0, (), ()),
        SamplePoint(Sampling(), 0, 0, 0, (), ()),
    ]
    kept_SV = masks.apply(logits_SV, spots)
    assert kept_SV.isfinite().sum(1).tolist() == [2, 8] and logits_SV.isfinite().all()
    assert masks.apply(logits_SV, spots[1:]) is logits_SV


def test_options_that_contradict_a_grammar_are_rejected() -> None:
    with pytest.raises(BadInput, match="grammar"):
        Sampling(structured=DATE, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter",
    [
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
        {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3},
    ],
)
def test_drafts_forbidden_by_the_grammar_change_nothing(
    engine: Engine, drafter: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is full of what no grammar allows, so that looked-up drafts violate it midway."""
    prompt = (
        'd = {"name": "x", "size": 2024-13-99+7+8, "kind": "maybe yes no"} # 2024-13-99+7+8\n' * 3
    )
    sampling = [
        Sampling(max_tokens=60, temperature=heat, seed=seed, structured=kind)
        for kind in (JSON, DATE, CHOICE, SUM)
        for heat, seed in ((0.0, 0), (1.0, 1), (1.0, 2))
    ]
    plain = engine.generate([prompt] * len(sampling), sampling)
    with Engine.open(
        "demo", max_num_seqs=8, kv_cache_memory_bytes=32 << 20, speculative_config=drafter
    ) as drafting:
        found = drafting.generate([prompt] * len(sampling), sampling)
        counts = drafting.counters()
        monkeypatch.setattr(guidance, "forbid", token_bits.forbid_widened)  # that of other devices
        again = drafting.generate([prompt] * len(sampling), sampling)
    assert counts["spec_decode_num_draft_tokens"] > counts["spec_decode_num_accepted_tokens"] > 0
    assert [each.tokens for each in again] == [each.tokens for each in found]
    for asked, before, after in zip(sampling, plain, found, strict=True):
        assert after.tokens == before.tokens, asked
        _check(asked.structured, after.text)


@pytest.mark.parametrize(
    ("kind", "text"), [(DATE, "2024-12-31"), (OutputGrammar("regex", "a+"), "aa")]
)
@pytest.mark.parametrize("behind", [[0], [0, 4], [4, 4, 0], [0, 4, 203], [203, 0, 4]])
@pytest.mark.parametrize("masking", [token_bits.forbid, token_bits.forbid_widened])
def test_draft_may_continue_past_the_end(
    engine: Engine,
    kind: OutputGrammar,
    text: str,
    behind: list[int],
    masking: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the grammar could continue (`a+`) or not.

    The model has two end-of-sequence tokens, 0 and 4. Every row up to the first impossible draft is
    masked as it would be on its own.
    """
    monkeypatch.setattr(guidance, "forbid", masking)  # that of the CPU, that of other devices
    masks, sampling = engine._masks, Sampling(structured=kind)
    masks.prepare(kind)
    draft = [*engine.tokenizer.encode(text, add_special_tokens=False), *behind]
    drawn = [tuple(draft[:length]) for length in range(len(draft) + 1)]
    spots = [SamplePoint(sampling, 5, len(each), 1, (9, *each), ()) for each in drawn]
    logits_SV = torch.zeros(len(spots), 4096)
    kept_SV = masks.apply(logits_SV, spots)
    num_said = len(draft) - len(behind)
    num_read = num_said + next((i for i, end in enumerate(behind) if end == 203), len(behind)) + 1
    for row in range(num_said + 1, num_read):
        assert kept_SV[row].isfinite().nonzero().flatten().tolist() == [0, 4]
    for row in range(num_read):
        alone = masks.apply(logits_SV[:1], spots[row : row + 1])
        assert torch.equal(alone[0], kept_SV[row])


def test_failed_matcher_is_not_used_again(engine: Engine) -> None:
    masks, kept = engine._masks, OutputGrammar("regex", "ab")
    masks.prepare(kept)
    spot = SamplePoint(Sampling(structured=kept), 5, 1, 1, (9, 203), ())
    good = SamplePoint(Sampling(structured=kept), 5, 0, 1, (9,), ())
    with pytest.raises(ArithmeticError, match="grammar"):
        masks.apply(torch.zeros(1, 4096), [spot])
    assert masks.apply(torch.zeros(1, 4096), [good]).isfinite().any()


@pytest.mark.slow
def test_drafts_past_the_end_of_an_answer_change_nothing(engine: Engine) -> None:
    """An earlier answer is drafted together with its end and with the answer after it."""
    sampling = [
        Sampling(max_tokens=60, temperature=1.0, seed=seed, structured=kind)
        for kind in (CHOICE, DATE, JSON)
        for seed in range(4)
    ]
    plain = engine.generate([PROMPT] * len(sampling), sampling)
    with Engine.open(
        "demo",
        max_num_seqs=8,
        kv_cache_memory_bytes=32 << 20,
        speculative_config={"method": "suffix", "num_speculative_tokens": 6},
    ) as drafting:
        for _ in range(2):
            found = drafting.generate([PROMPT] * len(sampling), sampling)
            assert [each.tokens for each in found] == [each.tokens for each in plain]
        assert drafting.counters()["spec_decode_num_accepted_tokens"] > 20


def test_similar_prompts_have_separate_matchers(engine: Engine) -> None:
    """Same seed, same last tokens, same length: a shared matcher would be reset by the other."""
    masks = engine._masks
    assert isinstance(masks, GuidanceMasks)
    masks.prepare(DATE)
    sampling = Sampling(structured=DATE, seed=7)
    prompts = [tuple(range(i, 200 + i)) + (9,) * 40 for i in range(3)]
    spots = [SamplePoint(sampling, 7, 0, len(prompt), prompt) for prompt in prompts]
    before = set(masks._states)
    masks.apply(torch.zeros(3, engine.resolved.spec.vocab_size), spots)
    assert len(set(masks._states) - before) == 3


@pytest.mark.parametrize("num", [1000, 2048])
def test_largest_allowed_number_of_choices_can_be_answered(engine: Engine, num: int) -> None:
    options = [f"option {i * 7919 % 10007} of all" for i in range(num)]
    kind = OutputGrammar("choice", json.dumps(options))
    answers = engine.generate(
        [PROMPT], Sampling(max_tokens=40, temperature=2.0, seed=1, n=4, structured=kind)
    )[0].answers
    assert {answer.text for answer in answers} <= set(options)


@pytest.mark.parametrize(
    "options",
    [["a", "ab"], ["", "a"], ['"\\', "\n\t"], ["a.*", "a/b"], ["\x7f", "\x01", "é\u2028"]],
)
def test_choices_are_returned_as_written(engine: Engine, options: list[str]) -> None:
    kind = OutputGrammar("choice", json.dumps(options))
    answers = engine.generate(
        [PROMPT], Sampling(max_tokens=40, temperature=3.0, seed=1, n=8, structured=kind)
    )[0].answers
    assert {answer.text for answer in answers} <= set(options)


@pytest.mark.parametrize("text", ["((x){1,100}){100,100}", "((((a){5,10}){1,2}){1,5000}){25,50}"])
def test_regex_that_can_start_only_once_is_rejected(engine: Engine, text: str) -> None:
    """The lexer, shared by all copies of a matcher, reaches its limit after the first step."""
    with pytest.raises(BadInput, match=r"too many|copies"):
        engine.generate([PROMPT], Sampling(max_tokens=4, structured=OutputGrammar("regex", text)))


def walked(engine: Engine, kind: OutputGrammar, seed: int) -> int:
    """The longest token sequence through a grammar, until it reaches its limits."""
    masks, output = engine._masks, list[int]()
    masks.prepare(kind)
    while len(output) < 200:
        spot = SamplePoint(Sampling(structured=kind), seed, len(output), 1, (9, *output), ())
        try:
            allowed = masks.apply(torch.zeros(1, 4096), [spot])[0].isfinite().nonzero().flatten()
        except BadInput:
            break
        texts = {engine.tokenizer.decode([int(token)]): int(token) for token in allowed}
        output.append(texts[max(texts, key=len)])
    return len(output)


def test_limits_of_a_grammar_do_not_depend_on_earlier_requests(engine: Engine) -> None:
    """An earlier request with the same grammar has used up limits of the shared lexer."""
    kind = OutputGrammar("regex", "((a{1,50}){1,20}){1,20}")
    found = [walked(engine, kind, seed) for seed in range(3)]
    assert 5 < found[0] < 200 and len(set(found)) == 1, found


@pytest.mark.parametrize("drafter", [None, {"method": "suffix", "num_speculative_tokens": 4}])
def test_logprobs_are_those_of_unmasked_logits(drafter: dict[str, object] | None) -> None:
    few = tuple(range(200, 260))
    with Engine.open(
        "demo",
        max_num_seqs=8,
        kv_cache_memory_bytes=32 << 20,
        dtype="float32",
        speculative_config=drafter,
    ) as engine:
        prompt = engine.tokenizer.encode(PROMPT)
        for fields in ({"structured": DATE}, {"allowed_token_ids": few}, {}):
            asked = Sampling(max_tokens=8, temperature=0.0, logprobs=2, **fields)  # type: ignore[arg-type]
            (answer,) = engine.generate([prompt], asked)[0].answers
            raw_TV = engine.logprobs_of([*prompt, *answer.tokens])[len(prompt) - 1 :]
            for token, logprob, raw_V in zip(answer.tokens, answer.logprobs, raw_TV, strict=False):
                assert logprob.logprob == pytest.approx(float(raw_V[token]), abs=1e-3)
                assert logprob.rank == int((raw_V > raw_V[token]).sum()) + 1
                best, value = logprob.top[0]
                assert best == int(raw_V.argmax())
                assert value == pytest.approx(float(raw_V.max()), abs=1e-3)
