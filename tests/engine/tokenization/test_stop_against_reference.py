"""Stop strings as the engine delivers them, against decoding everything and cutting it then.

Answers of random tokens (special ones, half characters, blanks at the beginning of words) come in
commits of several tokens of several choices, as drafts do, and end by a stop token or by length.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import pytest

from ridgeline.engine.tokenization import HfTokenizer, load_tokenizer
from ridgeline.engine.tokenization.event_texts import EventTexts
from ridgeline.records import Event, Finished, Request, Sampling, Token, Usage
from tests.engine.tokenization.test_detokenize import sentencepiece

PIECES = sentencepiece()
PIECES.inner.add_special_tokens(["</s>", "<m>", "<n>"])
END, FIRST = (PIECES.inner.token_to_id(text) for text in ("</s>", "<m>"))
PROMPT = tuple(PIECES.encode("b"))
DEMO = load_tokenizer("demo")
DEMO_END = max(DEMO.special_tokens.values())


class Answer(NamedTuple):
    """What a client gets: the text, what ended it, and how many tokens were counted."""

    text: str
    reason: str
    stop_reason: str | int | None
    num_tokens: int


class Case(NamedTuple):
    tokenizer: HfTokenizer
    prompt: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    end: int
    sampling: Sampling


def expected(case: Case, tokens: Sequence[int]) -> Answer:
    """One choice: after each token everything is decoded, and searched for the stop strings."""
    tokenizer, sampling = case.tokenizer, case.sampling
    special = {token: text for text, token in tokenizer.special_tokens.items()}
    mixed = [stop for stop in sampling.stop if stop not in special.values()]
    marks = {token: text for token, text in special.items() if any(text in s for s in mixed)}
    over_special = [stop for stop in mixed if any(mark in stop for mark in marks.values())]
    raw, places, text = "", list[int](), ""  # `places` in `raw` of the characters of `text`
    for count, token in enumerate(tokens, 1):
        num_raw, is_end = len(raw), token == case.end
        if not is_end or sampling.include_stop_str_in_output:
            whole = _decode(case, tokens[:count])
            is_last = count == len(tokens)
            whole = whole if is_last else whole.rstrip("\ufffd")
            places += range(num_raw, num_raw + len(whole) - len(text))
            raw, text = raw + whole[len(text) :], whole
        if token in marks and (is_end or sampling.skip_special_tokens):
            raw += marks[token]
        found: list[tuple[int, int, str]] = []
        if count > sampling.min_tokens:
            for end in range(num_raw + 1, len(raw) + 1):
                found += [(end, end - len(s), s) for s in over_special if raw[:end].endswith(s)]
                if end - 1 in places:
                    seen = text[: places.index(end - 1) + 1]
                    visible = [s for s in sampling.stop if s not in over_special]
                    found += [
                        (end, places[len(seen) - len(s)], s) for s in visible if seen.endswith(s)
                    ]
        if found:
            _, start, stop = min(found)
            shown = text[: sum(place < start for place in places)]
            shown += stop if sampling.include_stop_str_in_output else ""
            return Answer(shown, "stop", stop, count)
    is_ended = tokens[-1] == case.end
    return Answer(text, "stop" if is_ended else "length", case.end if is_ended else None, count)


def _decode(case: Case, tokens: Sequence[int]) -> str:
    skip, tokenizer = case.sampling.skip_special_tokens, case.tokenizer
    before = tokenizer.decode(case.prompt, skip_special_tokens=skip)
    whole = tokenizer.decode([*case.prompt, *tokens], skip_special_tokens=skip)
    return whole.removeprefix(before)


def delivered(case: Case, rng: random.Random) -> list[Answer]:
    """The choices of a request, from the events of commits of random lengths."""
    sent = [0] * len(case.choices)
    ends: dict[int, Finished] = {}

    def finished(index: int, reason: Any, stop_reason: int | str | None) -> Finished:
        usage = Usage(
            prompt_tokens=len(case.prompt), cached_tokens=0, completion_tokens=sent[index]
        )
        return Finished(
            request_id="r", at_s=0.0, index=index, reason=reason, stop_reason=stop_reason,
            usage=usage,
        )  # fmt: skip

    def finish(request_id: str, index: int, stop: str) -> list[Event]:
        ends[index] = finished(index, "stop", stop)
        return [ends[index]]

    texts, shown = EventTexts(case.tokenizer, finish), [""] * len(case.choices)
    texts.begin(Request(id="r", prompt=case.prompt, sampling=case.sampling, arrival_s=0.0))
    while len(ends) < len(case.choices):
        events: list[Event] = []
        for index, tokens in enumerate(case.choices):
            if index in ends:
                continue
            step = tokens[sent[index] : sent[index] + rng.randint(1, 4)]
            sent[index] += len(step)
            events += [Token(request_id="r", index=index, token=t, text="", at_s=0.0) for t in step]
            if sent[index] == len(tokens):
                is_ended = tokens[-1] == case.end
                last = case.end if is_ended else None
                events.append(finished(index, "stop" if is_ended else "length", last))
        for event in texts.add_texts(events):
            assert isinstance(event, Token | Finished)
            shown[event.index] += event.text
            if isinstance(event, Finished):
                ends[event.index] = event
    return [
        Answer(
            shown[index], ends[index].reason, ends[index].stop_reason,
            ends[index].usage.completion_tokens,
        )
        for index in range(len(case.choices))
    ]  # fmt: skip


def random_case(rng: random.Random, tokenizer: HfTokenizer) -> Case:
    is_pieces = tokenizer is PIECES
    end = END if is_pieces else DEMO_END
    marks = [token for token in tokenizer.special_tokens.values() if token != end]
    texts = ("a", "b", "ab", "你", "é")
    words = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    if is_pieces:
        words = [[t for t in word if PIECES.inner.id_to_token(t) != "▁"] for word in words]
        words.append([PIECES.inner.token_to_id("▁")])
    else:
        words.append(tokenizer.encode(" a", add_special_tokens=False))

    def tokens() -> tuple[int, ...]:
        made: list[int] = []
        for _ in range(rng.randint(1, 10)):
            made += [rng.choice(marks)] if marks and rng.random() < 0.3 else rng.choice(words)
        return (*made, end) if rng.random() < 0.7 else tuple(made)

    choices = tuple(tokens() for _ in range(rng.randint(1, 3)))
    stops: list[str] = []
    for _ in range(rng.randint(1, 3)):
        raw = tokenizer.decode(rng.choice(choices), skip_special_tokens=rng.random() < 0.3)
        start = rng.randrange(len(raw)) if raw else 0
        stop = raw[start : start + rng.randint(1, 9)].replace("\ufffd", "")
        stops.append(stop or "zz")
    special = tokenizer.special_tokens
    sampling = Sampling(
        stop=tuple(dict.fromkeys(stop for stop in stops if stop not in special)) or ("zz",),
        n=len(choices),
        include_stop_str_in_output=rng.random() < 0.3,
        skip_special_tokens=rng.random() < 0.7,
        min_tokens=rng.choice((0, 0, 0, 1, 2, 4)),
        max_tokens=100,
    )
    # The end of sequence is banned before min_tokens.
    choices = tuple(c for c in choices if len(c) > sampling.min_tokens) or ((words[0][0],) * 6,)
    sampling = msgspec.structs.replace(sampling, n=len(choices))
    prompt = (*tokenizer.encode("b", add_special_tokens=False), *words[0])
    return Case(tokenizer, prompt, choices, end, sampling)


@pytest.mark.parametrize("tokenizer", [PIECES, DEMO], ids=["sentencepiece", "bytes"])
def test_answers_are_those_of_decoding_everything_first(tokenizer: HfTokenizer) -> None:
    num_stopped = 0
    for seed in range(800):
        rng = random.Random(seed)
        case = random_case(rng, tokenizer)
        wanted = [expected(case, tokens) for tokens in case.choices]
        assert delivered(case, rng) == wanted, (seed, case)
        num_stopped += sum(isinstance(answer.stop_reason, str) for answer in wanted)
    assert num_stopped > 500


@pytest.mark.parametrize("skip", [True, False])
def test_stop_string_may_end_with_the_end_of_sequence(skip: bool) -> None:
    tokens = (*PIECES.encode("ab", add_special_tokens=False), END)
    sampling = Sampling(stop=("b</s>",), skip_special_tokens=skip, max_tokens=9)
    case = Case(PIECES, PROMPT, (tokens,), END, sampling)
    assert delivered(case, random.Random(0)) == [Answer(" a", "stop", "b</s>", len(tokens))]


def test_stop_string_may_begin_before_min_tokens_and_end_after_it() -> None:
    tokens = PIECES.encode("abcab", add_special_tokens=False)
    sampling = Sampling(stop=("ca",), min_tokens=3, max_tokens=9)
    case = Case(PIECES, PROMPT, (tuple(tokens),), END, sampling)
    assert delivered(case, random.Random(0))[0].text == " ab"


def test_special_tokens_do_not_split_characters_because_of_a_stop_string() -> None:
    first, second, third = PIECES.encode("👩", add_special_tokens=False)[-3:]
    start = PIECES.encode("👩", add_special_tokens=False)[-4]
    tokens = (start, first, FIRST, second, third)
    for stop in ((), ("<m>zz",)):
        sampling = Sampling(stop=stop, max_tokens=9)
        case = Case(PIECES, PROMPT, (tokens,), END, sampling)
        assert delivered(case, random.Random(0))[0].text == "👩"


def test_skipped_tokens_without_end_take_no_memory() -> None:
    growing = PIECES.detokenizer(PIECES.encode("ab"))
    unknown = PIECES.inner.get_vocab_size() + 7  # an id of the padding of the embedding
    for token in (END, unknown):
        assert {growing.push(token) for _ in range(1000)} == {""}
    assert len(growing._window) < 30  # type: ignore[attr-defined]
    assert growing.push(PIECES.encode("a", add_special_tokens=False)[-1]) == " a"
