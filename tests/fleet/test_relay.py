"""What the relay passes on, holds back and remembers, however the bytes are cut."""

from __future__ import annotations

import pytest

from ridgeline.fleet.relay import BrokenStream, StreamRelay

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


def test_client_gets_ids_and_an_earlier_state_can_be_had() -> None:
    relay = StreamRelay()
    relay.adds_ids = True
    relay.begin(IDENTITY)
    passed = relay.feed(MARKED)
    assert passed.startswith(b'data: {"a":": b"}\nid: cmpl-1/2\n\n')
    assert b"id: cmpl-1/6" in passed
    earlier = relay.up_to(2)
    assert earlier is not None
    point = earlier.resume_point()
    assert point is not None and point.tokens == ((11,),)
    assert relay.up_to(99) is None


def test_new_backend_of_a_stream_without_bytes_gives_it_its_identity() -> None:
    relay = StreamRelay()
    relay.begin(IDENTITY)
    relay.begin(b'{"id":"cmpl-2","created":6,"seed":1}')
    relay.feed(b": open\n\n")
    relay.begin(IDENTITY)
    point = relay.resume_point()
    assert point is not None and point.id == "cmpl-2"
