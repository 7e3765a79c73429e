"""`kv_transfer_params`: a prefill server answers with a handle, and a decode server uses it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.engine.engine import Engine
from ridgeline.serve.app import create_app
from tests.engine.kv_transfer.two_engines import client_of, two_engines

TEXT = "def add(a, b):\n    return a + b\n\n" * 12
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    with two_engines() as pair:
        yield pair


async def post(engine: Engine, path: str, **body: Any) -> httpx.Response:
    app = create_app(engine, ServerOptions(served_model_name="demo"))
    app.state.service.leases = engine.transfers
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.post(path, json={"model": "demo", **body})


def body_of(path: str, text: str) -> dict[str, Any]:
    if path == "/v1/completions":
        return {"prompt": text, "max_tokens": 6, "temperature": 0}
    if path == "/v1/responses":
        return {"input": text, "max_output_tokens": 6, "temperature": 0}
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 6, "temperature": 0}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"]
)
def test_answer_of_a_handle_is_that_of_a_whole_request(
    engines: tuple[Engine, Engine], path: str, streamed: bool
) -> None:
    prefill, decode = engines
    body = body_of(path, f"# {path} {streamed}\n{TEXT}")  # which no other case has cached

    async def both() -> tuple[httpx.Response, httpx.Response]:
        handle = await post(prefill, path, **body, kv_transfer_params=PREFILL)
        assert handle.status_code == 200, handle.text
        params = handle.json()["kv_transfer_params"]
        assert params["do_remote_prefill"] is True
        answer = await post(decode, path, **body, stream=streamed, kv_transfer_params=params)
        return answer, await post(prefill, path, **body, stream=streamed)

    before = client_of(decode).num_fetches
    answer, whole = asyncio.run(both())
    assert answer.status_code == whole.status_code == 200
    assert client_of(decode).num_fetches == before + 1
    assert not any(client_of(decode).fallbacks.values())
    assert text_of(answer) == text_of(whole) != []


def text_of(response: httpx.Response) -> list[str]:
    """What the model said, whatever the ids, times and counts."""
    return re.findall(r'"(?:text|delta|content)": ?("(?:[^"\\]|\\.)*")', response.text)


def test_prompt_that_fills_no_block_is_answered_with_one_token(
    engines: tuple[Engine, Engine],
) -> None:
    own = asyncio.run(
        post(engines[0], "/v1/completions", prompt="a", max_tokens=9, kv_transfer_params=PREFILL)
    )
    assert own.json()["usage"]["completion_tokens"] == 1
    assert "kv_transfer_params" not in own.json()


def test_server_without_the_role_ignores_the_field(engines: tuple[Engine, Engine]) -> None:
    answer = asyncio.run(
        post(engines[1], "/v1/completions", prompt=TEXT, max_tokens=2, kv_transfer_params=PREFILL)
    )
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert "kv_transfer_params" in answer.headers["x-ridgeline-ignored-fields"]


def test_malformed_handle_is_refused(engines: tuple[Engine, Engine]) -> None:
    answer = asyncio.run(
        post(engines[1], "/v1/completions", prompt=TEXT, kv_transfer_params={"num_tokens": "x"})
    )
    assert answer.status_code == 400
    assert "kv_transfer_params" in answer.text


def test_metrics_of_both_servers(engines: tuple[Engine, Engine]) -> None:
    async def pages() -> list[str]:
        texts = []
        for engine in engines:
            app = create_app(engine, ServerOptions(served_model_name="demo"))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as own:
                texts.append((await own.get("/metrics")).text)
        return texts

    prefill, decode = asyncio.run(pages())
    assert 'ridgeline_kv_transfer_sent_bytes_total{model_name="demo"} 0.0' not in prefill
    assert 'ridgeline_kv_transfer_fetched_bytes_total{model_name="demo"} 0.0' not in decode
    assert 'ridgeline_kv_transfer_fallbacks_total{model_name="demo",reason="lost"} 0.0' in decode
