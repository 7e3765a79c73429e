"""Server-sent events and what their chunks mean: every way in which servers differ."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.measure.client.http_target import _StreamReader
from ridgeline.measure.client.sse_parser import ServerEvent, SseParser
from ridgeline.measure.client.stream_chunks import (
    OutputChunk,
    count_tokens,
    decode_chunk,
    error_message,
    output_of,
)
from ridgeline.measure.client.target import Recorder


def events(*received: bytes):
    parser = SseParser()
    found = [event for part in received for event in parser.feed(part)]
    return found + list(parser.close())


def test_events_fields_comments_and_line_ends():
    found = events(
        b": ping\r\n\r\ndata: one\r\n\r\ndata:two\nid: 7\nretry: 1\n\n",
        b"event: error\ndata: a\ndata: b\n\nevent: lonely\n\n",
    )
    assert found == [
        ServerEvent(b"one"),
        ServerEvent(b"two"),
        ServerEvent(b"a\nb", "error"),
    ]


def test_only_one_space_after_the_colon_is_removed():
    assert events(b"data:  x\n\n") == [ServerEvent(b" x")]


def test_line_separators_inside_a_json_string_do_not_end_the_line():
    text = "a\u2028b\u2029c\u0085d\x0be"
    data = json.dumps({"t": text}, ensure_ascii=False).encode()
    (event,) = events(b"data: " + data + b"\n\n")
    assert json.loads(event.data) == {"t": text}


def test_an_event_without_its_empty_line_counts_at_the_end():
    assert events(b"data: x") == [ServerEvent(b"x")]
    assert events(b"data: x\n") == [ServerEvent(b"x")]
    assert events(b"data: x\n\n") == [ServerEvent(b"x")]
    assert events(b"") == []


@pytest.mark.slow
@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8")), max_size=6),
    st.lists(st.integers(1, 7), min_size=1, max_size=20),
)
def test_any_cut_of_the_stream_gives_the_same_events(texts, cuts):
    stream = b"".join(b"data: " + text.encode() + b"\n\n" for text in texts)
    parts, at, i = [], 0, 0
    while at < len(stream):
        parts.append(stream[at : at + cuts[i % len(cuts)]])
        at, i = at + cuts[i % len(cuts)], i + 1
    assert events(*parts) == events(stream) == [ServerEvent(text.encode()) for text in texts]


def chunk(delta=None, *, text=None, finish=None, **choice):
    body = {"index": 0, "finish_reason": finish, **choice}
    body |= {"text": text} if delta is None else {"delta": delta}
    return decode_chunk(json.dumps({"choices": [body]}).encode()).choices[0]


@pytest.mark.parametrize(
    ("delta", "is_output"),
    [
        ({"role": "assistant"}, False),
        ({"role": "assistant", "content": ""}, False),
        ({"role": "assistant", "content": None}, False),
        ({"role": "assistant", "content": "Hi"}, True),
        ({"content": "Hi"}, True),
        ({"content": ""}, True),  # a token that decodes to nothing
        ({}, False),
        ({"reasoning": "hm"}, True),
        ({"reasoning_content": "hm"}, True),
        ({"role": "assistant", "reasoning_content": "", "content": None}, False),
        ({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}, True),
        ({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}, True),
        ({"unknown": 3}, False),
    ],
)
def test_which_chat_chunks_are_output(delta, is_output):
    assert (output_of(chunk(delta), 0.0) is not None) == is_output


def test_empty_text_with_a_finish_reason_is_ambiguous():
    found = output_of(chunk({"content": ""}, finish="stop"), 0.0)
    assert found is not None
    assert found.doubtful
    assert output_of(chunk({}, finish="stop"), 0.0) is None
    completion = output_of(chunk(text="", finish="length"), 0.0)
    assert completion is not None
    assert completion.doubtful


def test_token_counts_from_the_chunk_are_used():
    assert output_of(chunk({"content": "ab"}, token_ids=[1, 2, 3]), 0.0).count == 3
    assert output_of(chunk({"content": "ab"}, logprobs={"content": [{}, {}]}), 0.0).count == 2
    assert output_of(chunk(text="ab", logprobs={"tokens": ["a", "b"]}), 0.0).count == 2
    assert output_of(chunk(text="ab"), 0.0).count is None


def test_errors_in_a_stream():
    assert error_message(decode_chunk(b'{"error": {"message": "boom", "code": 500}}')) == "boom"
    assert error_message(decode_chunk(b'{"error": "boom"}')) == "boom"
    assert (
        error_message(decode_chunk(b'{"object": "error", "message": "old style"}')) == "old style"
    )
    assert error_message(decode_chunk(b'{"error": null, "choices": []}')) is None


def pieces(*texts, **marks):
    return [OutputChunk(at_s=float(i), text=text, **marks) for i, text in enumerate(texts)]


def test_without_a_server_count_each_chunk_is_one_token():
    last = OutputChunk(at_s=9.0, text="", doubtful=True)
    assert count_tokens([*pieces("a", "b"), last], None) == [(0.0, 1), (1.0, 1)]


def test_ambiguous_chunk_counts_only_if_a_token_is_missing():
    last = OutputChunk(at_s=9.0, text="", doubtful=True)
    assert count_tokens([*pieces("a", "b"), last], 2) == [(0.0, 1), (1.0, 1)]
    assert count_tokens([*pieces("a", "b"), last], 3) == [(0.0, 1), (1.0, 1), (9.0, 1)]


def test_a_surplus_is_spread_by_text_length():
    assert count_tokens(pieces("aa", "aaaaaa"), 6) == [(0.0, 2), (1.0, 4)]


def test_reported_token_count_of_a_chunk_is_kept():
    counted = OutputChunk(at_s=0.0, text="aaaa", count=2)
    assert count_tokens([counted, OutputChunk(at_s=1.0, text="a")], 5) == [(0.0, 2), (1.0, 3)]


def test_keep_alives_are_not_counted_as_tokens():
    assert count_tokens(pieces("", "a", "", "b"), 2) == [(1.0, 1), (3.0, 1)]


@given(
    st.lists(st.tuples(st.text(max_size=8), st.booleans()), max_size=12),
    st.integers(0, 60),
)
def test_counts_always_add_up_to_the_servers(cases, total):
    made = [
        OutputChunk(at_s=float(i), text=text, doubtful=doubtful and not text)
        for i, (text, doubtful) in enumerate(cases)
    ]
    found = count_tokens(made, total)
    if made:
        assert sum(count for _, count in found) == total
    assert all(count > 0 for _, count in found)
    assert [at for at, _ in found] == sorted(at for at, _ in found)


@pytest.mark.parametrize(
    ("delta", "reasoning"),
    [
        ({"reasoning_content": "hm"}, True),
        ({"reasoning": "hm"}, True),
        ({"content": "So"}, False),
        ({"reasoning": "hm", "content": "So"}, False),
        ({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}, False),
    ],
)
def test_reasoning_is_distinguished_from_the_answer(delta, reasoning):
    assert output_of(chunk(delta), 0.0).reasoning is reasoning


def test_reader_records_when_the_answer_after_reasoning_began():
    now_s = 0.0
    record = Recorder(lambda: now_s)
    reader = _StreamReader(record, None)
    for now_s, delta in ((1.0, {"reasoning": "hm"}), (2.0, {"content": "So"})):  # noqa: B007
        body = json.dumps({"choices": [{"index": 0, "delta": delta}]})
        reader.feed(f"data: {body}\n\n".encode())
    reader.write_chunks()
    assert (record._reasoned, record._visible_s) == (True, 2.0)
