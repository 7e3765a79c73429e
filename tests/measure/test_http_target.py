"""The HTTP target against scripted servers: in virtual time without a socket, and once over a
real one.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from ridgeline.errors import BadInput
from ridgeline.measure.client.http_connection import HttpConnectionError
from ridgeline.measure.client.http_target import HttpTarget, authorization, base_url, first_model
from ridgeline.measure.client.load_client import LoadOptions, run_load
from ridgeline.measure.client.target import Recorder
from ridgeline.measure.metrics.latency import itl_s, outcome, tpot_s, ttft_s
from ridgeline.measure.workload import ChatPrompt, LoadRequest, PromptMessage
from ridgeline.measure.workload.arrivals import Closed, burst
from tests.measure.memory_transport import Answering, connect_to
from tests.measure.sse_server import DONE, SseServer, sse, text_chunk, usage


def chat_chunk(delta, finish=None, **more):
    return sse(choices=[{"index": 0, "delta": delta, "finish_reason": finish}], **more)


class Script:
    """Answers every POST with parts at given instants after the request."""

    def __init__(self, *parts, status=200, error=None):
        head = b"HTTP/1.1 %d .\r\n\r\n" % status
        broken = any(isinstance(part, Exception) for _, part in parts)
        end = [] if broken else [((parts[-1][0] if parts else 0.0) + 1e-6, None)]
        self._parts = [(0.0, head), *parts, *end]
        self._error, self.seen = error, []

    @property
    def bodies(self):
        return [(head.split()[1].decode(), json.loads(body)) for head, body in self.seen]

    async def connect(self, origin, protocol):
        if self._error is not None:
            raise self._error
        return await connect_to(lambda: Answering(self._parts, self.seen))(origin, protocol)


CHAT = LoadRequest(
    id="r", kind="chat", prompt=ChatPrompt((PromptMessage("user", "hi"),)), max_tokens=4
)
TEXT = LoadRequest(id="r", kind="text", prompt="hi", max_tokens=4)


def send(in_virtual_time, script, request, **target):
    async def main():
        async with asyncio.timeout(100):
            http = HttpTarget("http://host:1/v1/", "m", connect=script.connect, **target)
            loop = asyncio.get_running_loop()
            origin = loop.time()
            record = Recorder(lambda: loop.time() - origin)
            await http.send(request, record)
            await http.close()
            return record.to_trace(request, 0.0, 0.0)

    return in_virtual_time(main())


def test_chat_stream_with_unusual_chunks(in_virtual_time):
    script = Script(
        (0.1, chat_chunk({"role": "assistant", "content": ""})),  # metadata
        (0.2, b": keep-alive\n\n"),
        (0.5, chat_chunk({"content": "a\u2028"})),  # the first token
        (0.6, chat_chunk({"content": ""})),  # a token that decodes to nothing
        (0.9, chat_chunk({"content": "bcdefg"}) + chat_chunk({}, "length")),
        (2.0, sse(choices=[], usage=usage(4)) + DONE),
    )
    found = send(in_virtual_time, script, CHAT)
    assert outcome(found) == "ok"
    assert ttft_s(found) == pytest.approx(0.5)
    assert found.token_s == pytest.approx((0.5, 0.6, 0.9))
    assert found.token_counts == (1, 1, 2)  # four tokens in three chunks: the long one held two
    assert itl_s(found) == pytest.approx([0.1, 0.15, 0.15])
    assert tpot_s(found) == pytest.approx(0.4 / 3)
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens) == (12, 4, 4)
    assert found.finish_reason == "length"
    assert found.text == "a\u2028bcdefg"
    path, body = script.bodies[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (4, True, 0.0)


def choice(**fields):
    return sse(choices=[{"index": 0, "finish_reason": None, **fields}])


THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "hm "}]}


@pytest.mark.parametrize(
    ("chunks", "text", "tokens"),
    [
        ([chat_chunk({"content": [THOUGHT]}), chat_chunk({"content": [{"text": "a"}]})], "hm a", 2),
        ([chat_chunk({"thinking": "hm "}), chat_chunk({"content": "a"})], "hm a", 2),
        ([chat_chunk({"reasoning_details": [{"text": "hm "}]})], "hm ", 1),
        ([chat_chunk({"tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]})],
         'f{"a": 1}', 1),
        ([choice(index="0", delta={"content": "a"})], "a", 1),
        ([choice(delta={"content": "a"}, logprobs=[])], "a", 1),
        ([choice(delta={"content": "a"}, message="x")], "a", 1),
        ([sse(error="", choices=[{"delta": {"content": "a"}}])], "a", 1),
        ([sse(error={"message": ""}, choices=[{"delta": {"content": "a"}}])], "a", 1),
        ([choice(delta={"content": "a"}), sse(usage={"prompt_tokens": None})], "a", 1),
        ([choice(delta={"content": "a"}), sse(usage={"completion_tokens": "1"})], "a", 1),
        ([choice(delta={"content": "a"}), sse(usage={"prompt_tokens": 12.0})], "a", 1),
        ([choice(delta={"content": "ab"}), sse(choices=[], usage=usage(0))], "ab", 1),
    ],
)  # fmt: skip
def test_fields_of_other_types_are_read_for_what_is_needed(in_virtual_time, chunks, text, tokens):
    parts = [(0.1 * (i + 1), part) for i, part in enumerate(chunks)]
    found = send(in_virtual_time, Script(*parts, (1.0, chat_chunk({}, "stop") + DONE)), CHAT)
    assert (outcome(found), found.error, found.text) == ("ok", None, text)
    assert found.output_tokens == tokens and ttft_s(found) == pytest.approx(0.1)


@pytest.mark.parametrize("reason", ["error", "internal_error", "ERROR"])
def test_an_answer_that_ends_with_an_error_failed(in_virtual_time, reason):
    script = Script((0.1, chat_chunk({"content": "a"})), (0.2, chat_chunk({}, reason) + DONE))
    found = send(in_virtual_time, script, CHAT)
    assert outcome(found) == "failed" and reason in found.error


@pytest.mark.parametrize(
    ("extra", "started_s"),
    [
        ({"metrics": {"time_to_first_token_ms": 300.0, "queue_time_ms": 150.0}}, 0.2),  # vLLM, ours
        ({"timings": {"prompt_ms": 300.0, "prompt_n": 9}}, 0.2),  # llama.cpp
        ({"metrics": {"time_to_first_token_ms": 9000.0}}, 0.0),  # not before it was sent
        ({"metrics": {"time_to_first_token_ms": None}}, None),
        ({"metrics": "on request", "timings": [1, 2]}, None),
        ({}, None),
    ],
)
def test_timings_reported_by_the_server_are_read(in_virtual_time, extra, started_s):
    script = Script(
        (0.5, chat_chunk({"content": "a"})),
        (0.6, chat_chunk({"content": "b"}, "length")),
        (0.7, sse(choices=[], usage=usage(2), **extra) + DONE),
    )
    found = send(in_virtual_time, script, CHAT)
    assert outcome(found) == "ok" and found.token_s == pytest.approx((0.5, 0.6))
    assert found.started_s == (None if started_s is None else pytest.approx(started_s))
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens) == (12, 4, 2)


def test_completion_stream_split_at_arbitrary_places(in_virtual_time):
    stream = text_chunk("é") + text_chunk("b") + text_chunk("", "length") + DONE
    script = Script(*[(0.1 * (i + 1), stream[i : i + 9]) for i in range(0, len(stream), 9)])
    found = send(in_virtual_time, script, TEXT)
    assert found.text == "éb"
    assert found.token_counts == (1, 1)
    assert script.bodies[0][0] == "/v1/completions"


def test_continuous_usage_gives_the_tokens_of_each_chunk(in_virtual_time):
    script = Script(
        (0.1, text_chunk("a", usage=usage(1))),
        (0.2, text_chunk("b", usage=usage(4))),
        (0.3, text_chunk("", "length", usage=usage(6)) + DONE),
    )
    found = send(in_virtual_time, script, TEXT)
    assert found.token_counts == (1, 3, 2)
    assert found.output_tokens == 6


def test_without_usage_the_chunks_are_counted(in_virtual_time):
    script = Script((0.1, text_chunk("a")), (0.2, text_chunk("b", "stop")), (0.3, DONE))
    found = send(in_virtual_time, script, TEXT)
    assert (found.output_tokens, found.prompt_tokens) == (2, 0)


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        (sse(error={"message": "out of blocks"}), "out of blocks"),
        (b'event: error\ndata: {"detail": "x"}\n\n', '{"detail": "x"}'),
        (b"data: {half\n\n", "malformed chunk"),
        (b"", "ended before its finish_reason"),
        (ConnectionResetError(), "ReadError: reset"),
    ],
)
def test_a_stream_that_breaks_keeps_its_tokens(in_virtual_time, tail, words):
    script = Script((0.1, text_chunk("a")), (0.2, text_chunk("b")), (0.3, tail))
    found = send(in_virtual_time, script, TEXT)
    assert outcome(found) == "failed"
    assert words in found.error
    assert found.token_s == pytest.approx((0.1, 0.2))
    assert found.output_tokens == 2


def test_rejections_and_connection_errors_keep_their_messages(in_virtual_time):
    refused = send(in_virtual_time, Script((0.0, b"queue is full\n"), status=503), TEXT)
    assert refused.error == "HTTP 503: queue is full"
    gone = send(
        in_virtual_time, Script(error=HttpConnectionError("ConnectError: connection refused")), TEXT
    )
    assert gone.error == "ConnectError: connection refused"


def test_timeout_keeps_the_received_tokens(in_virtual_time):
    script = Script((0.1, text_chunk("a")), (9.0, DONE))

    async def main():
        target = HttpTarget("http://host", "m", connect=script.connect)
        options = LoadOptions(num_requests=1, timeout_s=0.5)
        workload = _One(TEXT)
        run = await run_load(target, workload, burst(), options)
        await target.close()
        return run.requests[0]

    found = in_virtual_time(main())
    assert outcome(found) == "timeout"
    assert found.token_s == pytest.approx((0.1,))
    assert found.text == "a"


class _One:
    name = "one"

    def __init__(self, request):
        self._request = request

    def sample(self, n, seed):
        for i in range(n):
            yield LoadRequest(
                id=f"{seed}-{i}", kind="text", prompt=self._request.prompt, max_tokens=4
            )


def test_endpoints(in_virtual_time):
    ids = LoadRequest(id="r", kind="ids", prompt=(5, 6), max_tokens=1, ignore_eos=False)
    script = Script((0.0, text_chunk("a", "length") + DONE))
    send(in_virtual_time, script, ids)
    send(in_virtual_time, script, TEXT, endpoint="chat")
    send(in_virtual_time, script, CHAT, endpoint="completions")
    (first, a), (second, b), (third, c) = script.bodies
    assert (first, a["prompt"], "ignore_eos" in a) == ("/v1/completions", [5, 6], False)
    assert (second, b["messages"][0]["content"]) == ("/v1/chat/completions", "hi")
    assert (third, c["prompt"]) == ("/v1/completions", "User: hi\n\nAssistant:")
    with pytest.raises(BadInput, match="does not accept token ids"):
        send(in_virtual_time, script, ids, endpoint="chat")


@pytest.mark.parametrize("url", ["host", "ftp://host", "http://", "", "http://[::1", "http:// x"])
def test_non_http_urls_are_rejected(url):
    with pytest.raises(BadInput):
        base_url(url)


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "host:8000/v1", "[::1]:8000", "a.b-c:80/"])
def test_host_and_port_mean_http(address):
    assert base_url(address) == "http://" + address.removesuffix("/").removesuffix("/v1")


@pytest.mark.parametrize("key", ["☃", "a\r\nx: y", "\0"])
def test_api_key_that_is_no_valid_header_is_rejected(key):
    with pytest.raises(BadInput, match="printable ASCII"):
        authorization(key)
    assert authorization(None) == authorization("") == {}
    assert authorization("a b") == {"Authorization": "Bearer a b"}


def test_endpoint_paths_are_removed_from_urls():
    assert base_url("http://h:1/v1/") == base_url("http://h:1/") == "http://h:1"
    assert base_url("http://h/gateway/v1") == "http://h/gateway"


async def test_a_server_without_models_is_named():
    empty = Script((0.0, b'{"data": []}'))
    with pytest.raises(BadInput, match="no OpenAI-compatible server"):
        await first_model("http://h", connect=empty.connect)


async def test_over_a_real_socket():
    scripted = SseServer()
    async with await scripted.start():
        url = scripted.url
        target = HttpTarget(url, await first_model(url))
        options = LoadOptions(num_requests=6, timeout_s=20)
        run = await run_load(target, _One(TEXT), Closed(3), options)
        await target.close()
    assert run.target == f"{url} (tiny)"
    assert [r.error for r in run.requests] == [None] * 6
    assert {r.text for r in run.requests} == {"a\u2028c"}
    assert {r.output_tokens for r in run.requests} == {3}
    assert all(0 < ttft_s(r) < 5 for r in run.requests)


async def test_a_closed_port_is_a_clear_error():
    scripted = SseServer()
    async with await scripted.start():
        pass
    with pytest.raises(BadInput, match="start the server"):
        await first_model(scripted.url)
