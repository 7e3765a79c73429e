"""Unstreamed responses: they arrive at once, and TGI's headers say when they started."""

from __future__ import annotations

import asyncio
import json

import pytest

from ridgeline.config.load import BenchOptions
from ridgeline.measure.bench_options import run_bench
from ridgeline.measure.client.http_target import HttpTarget, queue_time_s
from ridgeline.measure.client.target import Recorder
from ridgeline.measure.metrics.latency import e2e_s, queue_s, tpot_s
from ridgeline.measure.workload import ChatPrompt, LoadRequest, PromptMessage
from tests.measure.memory_transport import Answering, connect_to

CHAT = LoadRequest(
    id="r", kind="chat", prompt=ChatPrompt((PromptMessage("user", "hi"),)), max_tokens=4
)
TEXT = LoadRequest(id="r", kind="text", prompt="hi", max_tokens=4)
USAGE = {"prompt_tokens": 5, "completion_tokens": 3}
TGI = {
    "x-compute-type": "cpu",
    "x-total-time": "900",
    "x-validation-time": "20",
    "x-queue-time": "180",
    "x-inference-time": "700",
    "x-time-per-token": "233",
}
"""The names and units (whole milliseconds) are those of the source of TGI's router."""


def answer(body, headers=(), at_s=0.9):
    lines = "".join(f"{name}: {value}\r\n" for name, value in dict(headers).items())
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\n{lines}\r\n".encode()
    return [(0.0, b""), (at_s, head + data)]


def completion(text="abc", **more):
    return {"choices": [{"text": text, "finish_reason": "length"}], "usage": USAGE, **more}


def sent(in_virtual_time, parts, request=TEXT, seen=None):
    async def main():
        loop = asyncio.get_running_loop()
        origin = loop.time()
        record = Recorder(lambda: loop.time() - origin)
        connect = connect_to(lambda: Answering(parts, [] if seen is None else seen))
        http = HttpTarget("http://host:1", "m", connect=connect, stream=False)
        await http.send(request, record)
        await http.close()
        return record.to_trace(request, 0.0, 0.0)

    return in_virtual_time(main())


def test_unstreamed_response_has_one_arrival_time(in_virtual_time):
    seen = []
    trace = sent(in_virtual_time, answer(completion()), seen=seen)
    assert (trace.error, trace.text, trace.finish_reason) == (None, "abc", "length")
    assert (trace.prompt_tokens, trace.output_tokens, trace.token_counts) == (5, 3, (3,))
    assert e2e_s(trace) == pytest.approx(0.9, abs=1e-3) and tpot_s(trace) is None
    assert trace.started_s is None
    assert "stream" not in json.loads(seen[0][1])


def test_a_chat_answer_has_a_message(in_virtual_time):
    body = {
        "choices": [{"message": {"role": "assistant", "content": "abc"}, "finish_reason": "stop"}],
        "usage": USAGE,
    }
    trace = sent(in_virtual_time, answer(body), CHAT)
    assert (trace.text, trace.output_tokens, trace.error) == ("abc", 3, None)


def test_tgis_headers_say_when_a_request_first_ran(in_virtual_time):
    trace = sent(in_virtual_time, answer(completion(), TGI))
    assert queue_s(trace) == pytest.approx(0.2, abs=1e-6)


def test_prefill_time_alone_does_not_give_the_start(in_virtual_time):
    body = completion(timings={"prompt_ms": 100.0, "predicted_ms": 700.0})
    assert sent(in_virtual_time, answer(body)).started_s is None


def test_malformed_response_is_a_failure(in_virtual_time):
    assert "malformed" in sent(in_virtual_time, answer(["no"])).error
    assert "finish_reason" in sent(in_virtual_time, answer({"choices": []})).error


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"x-queue-time": "180"}, 0.18),
        ({"x-queue-time": "soon"}, None),
        ({"x-queue-time": "-3"}, None),
        ({"x-queue-time": "inf"}, None),
        (TGI, 0.2),
    ],
)
def test_numeric_headers_are_used(headers, seconds):
    assert queue_time_s(headers) == (None if seconds is None else pytest.approx(seconds))


def test_unstreamed_load_has_a_different_name(in_virtual_time):
    async def main():
        parts = answer(completion(), at_s=0.01)
        http = HttpTarget(
            "http://h:1", "m", connect=connect_to(lambda: Answering(parts, [])), stream=False
        )
        options = BenchOptions(
            workload="synthetic:input=4,output=3", num_prompts=2, num_warmups=0, stream=False
        )
        run = await run_bench(http, options)
        await http.close()
        return run

    run = in_virtual_time(main())
    assert run.workload.endswith("(whole answers)")
    assert [r.output_tokens for r in run.requests] == [3, 3]
