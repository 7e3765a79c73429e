"""What the relay passes on, holds back and remembers, however the bytes are cut."""

from __future__ import annotations

import re

import pytest

from ridgeline.fleet.relay import BrokenStream, StreamPosition, StreamRelay
from ridgeline.serve.config import LIMITS

REQUEST = bytes(range(16))
IDENTITY = b'{"id":"cmpl-1","created":5,"seed":9}'
PARTS = [
    b'data: {"a":": b"}\n\n: 0:11\n\n',
    b'event: x\ndata: {}\n\ndata: {"two":1}\n\n: 1:12\n\n',
    b": 0:13\n\n",
    b'data: {"n":"\\n\\n: 0:99\\n\\n"}\n\n: 0:\n\n',
    b"data: [DONE]\n\n: end\n\n",
]
MARKED = b": open\n\n" + b"".join(PARTS)
CLEAN = (
    b'data: {"a":": b"}\n\nevent: x\ndata: {}\n\ndata: {"two":1}\n\n'
    b'data: {"n":"\\n\\n: 0:99\\n\\n"}\n\ndata: [DONE]\n\n'
)


def relay_of(data: bytes, *cuts: int) -> tuple[StreamRelay, bytes]:
    relay = StreamRelay()
    relay.begin(IDENTITY)
    passed, start = b"", 0
    for cut in (*cuts, len(data)):
        passed += relay.feed(data[start:cut])
        start = cut
    return relay, passed


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_comments_are_taken_out_however_the_bytes_are_cut(size: int) -> None:
    relay, passed = relay_of(MARKED, *range(size, len(MARKED), size))
    assert passed == CLEAN and relay.has_ended
    point = relay.resume_point()
    assert point is not None and point.opened
    assert point.tokens == ((11, 13), (12,)) and point.seed == 9


def test_only_whole_updates_are_passed_on_at_any_byte() -> None:
    whole = {b"", *(CLEAN[:end] for end in _ends())}
    for cut in range(len(MARKED) + 1):
        relay, passed = relay_of(MARKED[:cut])
        assert passed in whole
        point = relay.resume_point()
        assert (0 if point is None else point.num_tokens) == _num_tokens(cut)


def _ends() -> list[int]:
    return [i + 2 for i in range(len(CLEAN)) if CLEAN.startswith(b"\n\n", i)]


def _num_tokens(cut: int) -> int:
    """Tokens whose comment is complete in the first `cut` bytes."""
    ends = [MARKED.index(part) + len(part) for part in PARTS[:3]]
    return sum([end <= cut for end in ends])


def test_other_servers_streams_end_at_a_whole_event() -> None:
    relay = StreamRelay()
    relay.begin(None)
    assert relay.feed(b"data: 1\n\ndata: 2") == b"data: 1\n\n"
    assert relay.feed(b"\n") == b""
    assert relay.feed(b"\n") == b"data: 2\n\n"
    assert relay.feed(b"data: 3\r\n\r\nda") == b"data: 3\r\n\r\n"
    assert relay.flush() == b"da" and relay.resume_point() is None


def test_what_is_held_back_is_bounded() -> None:
    relay = StreamRelay()
    relay.begin(None)
    with pytest.raises(BrokenStream):
        for _ in range(100):
            relay.feed(b"x" * 20_000)


def with_ids(relay: StreamRelay, data: bytes) -> tuple[list[bytes], list[str]]:
    """The events that are passed on, and the id of each update."""
    relay.begin(IDENTITY)
    updates = re.split(rb"(?<=\n)id: ", relay.feed(data))
    ids = [update.split(b"\n", 1)[0].decode() for update in updates[1:]]
    return re.findall(rb"data: [^\n]+", b"\n".join(updates)), ids


def position(event_id: str) -> StreamPosition:
    parsed = StreamPosition.parse(event_id, REQUEST)
    assert parsed is not None
    return parsed


def test_client_gets_ids_from_which_the_stream_goes_on() -> None:
    relay = StreamRelay(StreamPosition(REQUEST))
    events, ids = with_ids(relay, MARKED)
    start = f"cmpl-1/5.9.{REQUEST.hex()[:12]}."
    plain = [re.sub("-[0-9a-f]{6}", "", event_id) for event_id in ids]
    assert plain == [start + end for end in ("o1", "o1_1", "o3_1", "o3_1e")]
    for number, event_id in enumerate(ids[:-1], 1):
        kept, fresh = StreamRelay(position(event_id)), StreamRelay(position(event_id))
        kept.take_over(relay)
        point, unknown = kept.resume_point(), fresh.resume_point()
        assert point is not None and unknown is not None
        assert point.opened and point.tokens[0] == ((11,), (11,), (11, 13))[number - 1]
        assert not unknown.opened and not unknown.tokens and unknown.id == "cmpl-1"
        rest, rest_ids = with_ids(fresh, MARKED)
        assert rest == events[-len(rest) :] and rest_ids == ids[number:]
        assert fresh.has_ended


def test_choices_that_come_in_another_order_are_neither_repeated_nor_left_out() -> None:
    def data(*updates: tuple[int, int]) -> bytes:
        return b"".join(b'data: {"c":%d,"t":%d}\n\n: %d:%d\n\n' % (c, t, c, t) for c, t in updates)

    first = StreamRelay(StreamPosition(REQUEST))
    before, ids = with_ids(first, data((0, 1), (0, 2), (1, 11), (0, 3)))
    again = StreamRelay(position(ids[-1]))
    after, ids = with_ids(again, data((1, 11), (1, 12), (0, 1), (0, 2), (1, 13), (0, 3), (0, 4)))
    assert re.fullmatch(r".*\.4-[0-9a-f]{6}_3-[0-9a-f]{6}", ids[-1])
    whole = [b'data: {"c":%d,"t":%d}' % pair for pair in ((1, 12), (1, 13), (0, 4))]
    assert after == whole and len(before) == 4


def test_another_backend_goes_on_in_the_middle_of_what_the_client_has() -> None:
    _, ids = with_ids(StreamRelay(StreamPosition(REQUEST)), MARKED)
    relay = StreamRelay(position(ids[2]))
    assert with_ids(relay, MARKED[: MARKED.index(PARTS[1])])[0] == []
    point = relay.resume_point()
    assert point is not None and point.tokens == ((11,),)
    events, _ = with_ids(relay, b"".join(PARTS[1:]))
    assert events == [b"data: [DONE]"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cmpl-1/2",
        "cmpl-1/5.9.ffffffffffff.o1",
        "c/5.9.000102030405.o1_",
        "c/5.9.000102030405.1x",
        "c/5.9.000102030405.o1",
        "c/5.9.000102030405.1-00000_1-000000",
        "c/5.9.000102030405." + "_".join(["1-000000"] * 1025),
    ],
)
def test_ids_that_are_none_are_refused(text: str) -> None:
    assert StreamPosition.parse(text, REQUEST) is None


def test_id_names_as_many_choices_as_a_request_may_have() -> None:
    event_id = "c/5.9.000102030405." + "_".join(["1-0000ff"] * LIMITS.max_choices)
    assert position(event_id).sums == [255] * LIMITS.max_choices


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b": 0:11\n", b": 0:10\n"),
        (b": 1:12\n", b": 1:11\n"),
        (b": 0:13\n", b": 0:\n"),
        (b": 0:13\n\n", b""),  # it ends before the position
    ],
    ids=["first", "other-choice", "end-instead", "shorter"],
)
def test_another_answer_does_not_go_on_with_the_stream(old: bytes, new: bytes, size: int) -> None:
    _, ids = with_ids(StreamRelay(StreamPosition(REQUEST)), MARKED)
    relay, data = StreamRelay(position(ids[2])), MARKED.replace(old, new)
    assert data != MARKED
    relay.begin(IDENTITY)
    with pytest.raises(BrokenStream):
        for start in range(0, len(data), size):
            assert not relay.feed(data[start : start + size])
    assert relay.is_other


@pytest.mark.parametrize(
    "error", [b'data: {"error":{}}\n\ndata: [DONE]\n\n', b"event: error\ndata: {}\n\n"]
)
def test_error_before_the_position_is_passed_on(error: bytes) -> None:
    _, ids = with_ids(StreamRelay(StreamPosition(REQUEST)), MARKED)
    relay = StreamRelay(position(ids[2]))
    relay.begin(IDENTITY)
    passed = relay.feed(MARKED[: MARKED.index(PARTS[1])] + error + b": end\n\n")
    assert passed.startswith(error[:-1] + b"id: cmpl-1/") and relay.has_ended


def test_new_backend_of_a_stream_without_bytes_gives_it_its_identity() -> None:
    relay = StreamRelay()
    relay.begin(IDENTITY)
    relay.begin(b'{"id":"cmpl-2","created":6,"seed":1}')
    relay.feed(b": open\n\n")
    relay.begin(IDENTITY)
    point = relay.resume_point()
    assert point is not None and point.id == "cmpl-2"
