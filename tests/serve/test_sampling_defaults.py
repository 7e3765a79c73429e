"""Every endpoint applies the model's sampling defaults to what a request leaves out."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from ridgeline.records import SamplingDefaults
from tests.serve.fake_engine import FakeEngine

DEFAULTS = SamplingDefaults(temperature=0.6, top_k=20, repetition_penalty=1.1)
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3}),
    ],
)
async def test_explicit_values_win_over_the_models_defaults(
    path: str, body: dict[str, object], http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.info = msgspec.structs.replace(engine.info, default_sampling=DEFAULTS)
    for extra, temperature in (({}, 0.6), ({"temperature": 0}, 0.0)):
        reply = await http.post(path, json={"model": "fake", **body, **extra})
        assert reply.status_code == 200, reply.text
        *_, (_, sampling, _, _) = engine.requests.values()
        assert (sampling.temperature, sampling.top_k) == (temperature, 20)
        assert sampling.repetition_penalty == 1.1
