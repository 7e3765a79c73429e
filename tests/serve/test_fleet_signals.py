"""What autoscalers, alerts and managed platforms read of a server."""

from __future__ import annotations

import httpx
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.engine.scheduler.admission.queue_limits import QueueLimiter, QueueLimits
from ridgeline.serve.app import create_app
from ridgeline.serve.metrics.registry import REFUSAL_REASONS
from tests.serve.fake_engine import FakeEngine


def client_of(options: ServerOptions, engine: FakeEngine | None = None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=create_app(engine or FakeEngine(), options))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_every_slo_class_and_reason_exists_at_zero() -> None:
    options = ServerOptions(slo_classes="chat=ttft:500 tpot:50;bulk=e2e:60000")
    async with client_of(options) as http:
        page = (await http.get("/metrics")).text
    lines = set(page.splitlines())
    for name, reasons in {"chat": ("ttft", "tpot", "failed"), "bulk": ("e2e", "failed")}.items():
        labels = f'model_name="fake",slo_class="{name}"'
        assert f"ridgeline_slo_requests_total{{{labels}}} 0.0" in lines
        assert f"ridgeline_slo_met_total{{{labels}}} 0.0" in lines
        for why in reasons:
            assert f'ridgeline_slo_missed_total{{{labels},why="{why}"}} 0.0' in lines
    for reason in REFUSAL_REASONS:
        series = f'ridgeline_requests_refused_total{{model_name="fake",reason="{reason}"}} 0.0'
        assert series in lines
    assert 'ridgeline_saturation_ratio{model_name="fake",slo_class="chat"} 0.0' in lines
    assert 'slo_class="bulk"} ' not in page.split("ridgeline_saturation_ratio{")[-1]


def test_queue_age_is_that_of_the_oldest_request() -> None:
    limiter = QueueLimiter(QueueLimits())
    assert limiter.age_s(100.0) == 0.0
    for name, at_s in (("a", 10.0), ("b", 12.0)):
        limiter.admit(name, 5, None, at_s)
    assert limiter.age_s(15.0) == 5.0
    limiter.note_started("a", 15.0)
    assert limiter.age_s(15.0) == 3.0
    limiter.remove("b")
    assert limiter.age_s(20.0) == 0.0


def test_predicted_ttft_is_the_wait_plus_the_time_to_serve() -> None:
    limiter = QueueLimiter(QueueLimits())
    assert limiter.predict_ttft_s(0.0) == 0.0
    limiter.admit("a", 10, None, 0.0)
    limiter.note_started("a", 1.0)
    limiter.note_token("a", 1.5)
    assert limiter.predict_ttft_s(2.0) == pytest.approx(0.5)
    limiter.admit("b", 10, None, 2.0)
    assert limiter.predict_ttft_s(6.0) == pytest.approx(4.5)


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}, "chat.completion"),
        ({"prompt": "hi", "max_tokens": 3}, "text_completion"),
        ({"input": "hi"}, "list"),
    ],
)
async def test_invocations_dispatch_on_the_body(body: dict[str, object], answer: str) -> None:
    async with client_of(ServerOptions()) as http:
        reply = await http.post("/invocations", json=body)
        assert reply.status_code == 200 and reply.json()["object"] == answer


async def test_invocations_stream_and_refuse() -> None:
    async with client_of(ServerOptions()) as http:
        reply = await http.post(
            "/invocations", json={"prompt": "hi", "max_tokens": 3, "stream": True}
        )
        assert reply.text.endswith("data: [DONE]\n\n")
        reply = await http.post("/invocations", json={"text": "hi"})
        assert reply.status_code == 400 and "messages, prompt" in reply.json()["error"]["message"]
        reply = await http.post("/invocations", json={"prompt": "hi", "max_tokens": "many"})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "max_tokens"
