"""Queue, prefill and decode times of a request."""

from __future__ import annotations

import httpx
import pytest

from ridgeline.records import Finished, Started, Token, Usage
from ridgeline.serve.metrics.registry import Metrics
from tests.serve.fake_engine import FakeEngine


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _token(at_s: float) -> Token:
    return Token(request_id="a", index=0, at_s=at_s, token=1, text="x")


def test_queue_prefill_and_decode_times() -> None:
    """Arrival at 100, first scheduled step at 103, first token at 107, the last of three at 111."""
    clock = Clock()
    metrics = Metrics(FakeEngine(), "m", now=clock)
    timer = metrics.time_request(5, 1)
    clock.now_s = 107.0
    timer.observe([Started(request_id="a", at_s=103.0, cached_tokens=0), _token(107.0)], 107.0)
    timer.observe([_token(109.0)], 109.0)
    usage = Usage(prompt_tokens=5, cached_tokens=0, completion_tokens=3)
    ended = Finished(request_id="a", index=0, reason="length", at_s=111.0, usage=usage)
    timer.observe([_token(111.0), ended], 111.0)
    page = metrics.render().decode()
    for name, seconds in (
        ("request_queue_time", 3.0),
        ("request_prefill_time", 4.0),
        ("request_decode_time", 4.0),
        ("request_inference_time", 8.0),
        ("time_to_first_token", 7.0),
    ):
        assert f'vllm:{name}_seconds_sum{{model_name="m"}} {seconds}' in page, name
    assert timer.timings() == pytest.approx(
        {  # as vLLM's: separate stages, and the rate over prefill and decode
            "time_to_first_token_ms": 4000.0,
            "generation_time_ms": 4000.0,
            "queue_time_ms": 3000.0,
            "mean_itl_ms": 2000.0,
            "tokens_per_second": 3 / 8,
        }
    )


def test_queue_time_is_never_negative() -> None:
    metrics = Metrics(FakeEngine(), "m", now=Clock())
    metrics.time_request(5, 1).observe([Started(request_id="a", at_s=0.0, cached_tokens=0)], 100.0)
    assert 'vllm:request_queue_time_seconds_sum{model_name="m"} 0.0' in metrics.render().decode()


async def test_parameters_of_refused_requests_are_not_counted(http: httpx.AsyncClient) -> None:
    for prompt in ("x" * 300, "ab"):  # the first is longer than the context
        body = {"prompt": prompt, "n": 2, "max_tokens": 3}
        await http.post("/v1/completions", json=body)
    page = (await http.get("/metrics")).text
    for name in ("n", "max_tokens"):
        assert f'vllm:request_params_{name}_count{{model_name="fake"}} 1.0' in page
