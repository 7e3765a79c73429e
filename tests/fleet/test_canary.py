"""A gateway with a canary: copies are compared, sessions are divided, faults end the rollout."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.errors import BadInput
from ridgeline.fleet.canary.compare_answers import ComparedAnswer, count_differences, json_answer
from ridgeline.fleet.canary.rollout import Rollout, RolloutConfig
from tests.fleet.scripted import HEAD, ScriptedBackend, chunk, gateway_over

TOKENS = list(range(10, 16))
BODY = {"model": "m", "prompt": "x", "stream": True}


def server(tokens: list[int] | None = None, status: int = 200) -> ScriptedBackend:
    async def answer(
        backend: ScriptedBackend, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        if status != 200:
            writer.write(b"HTTP/1.1 %d No\r\ncontent-length: 2\r\n\r\n{}" % status)
            return
        identity = b'x-ridgeline-resume: {"id":"c-1","created":1,"seed":1}\r\n\r\n'
        writer.write(HEAD + identity)
        for token in tokens or TOKENS:
            writer.write(chunk(b'data: {"t":%d}\n\n: 0:%d\n\n' % (token, token)))
        writer.write(chunk(b"data: [DONE]\n\n: end\n\n") + b"0\r\n\r\n")

    return ScriptedBackend(answer)


async def post(http: httpx.AsyncClient, session: str) -> httpx.Response:
    return await http.post(
        "/v1/completions", json={**BODY, "user": session}, headers={"x-session-id": session}
    )


async def record(http: httpx.AsyncClient) -> dict[str, Any]:
    await asyncio.sleep(0.05)  # copies are compared after the answer
    page: dict[str, Any] = (await http.get("/canary")).json()
    return page


async def test_canary_with_one_other_token_is_rolled_back_unseen(tmp_path: Path) -> None:
    stable, canary = server(), server([*TOKENS[:5], 99])
    options = {"shadow_share": 1.0, "state": tmp_path / "state.json"}
    async with gateway_over(stable, canary=(canary,), canary_options=options) as http:
        reply = await post(http, "a")
        assert b"99" not in reply.content and b'"t":15' in reply.content
        page = await record(http)
        assert page["state"] == "rolled-back" and page["num_compared_tokens"] == 6
        assert (await http.get("/canary/verdict")).status_code == 406
        metrics = (await http.get("/metrics")).text
        assert 'ridgeline_canary_state{state="rolled-back"} 1.0' in metrics
        for i in range(20):
            await post(http, str(i))
    assert len(canary.bodies) == 1 and canary.bodies[0]["ridgeline_resume"]["seed"] == 1
    kept = json.loads((tmp_path / "state.json").read_text())
    assert kept["rollout"]["reasons"] == ["its answers differ from the stable version's"]


async def test_equal_canary_gets_its_share_and_is_promoted() -> None:
    stable, canary = server(), server()
    options = {
        "shadow_share": 1.0,
        "min_tokens": 20,
        "min_sessions": 10,
        "stages": "0.5",
        "max_slowdown": 10.0,
    }
    async with gateway_over(stable, canary=(canary,), canary_options=options) as http:
        for i in range(10):
            await post(http, f"shadow {i}")
            if (await record(http))["state"] == "split":
                break
        assert (await http.get("/canary/verdict")).status_code == 200
        num_copies = len(canary.bodies)
        for i in range(60):
            await post(http, f"split {i}")
            if (await record(http))["state"] == "promoted":
                break
        assert (await record(http))["state"] == "promoted"
        own = [b for b in canary.bodies[num_copies:] if "ridgeline_resume" not in b]
        assert len(own) == 10
        for i in range(4):
            await post(http, f"after {i}")
        assert len(canary.bodies) > num_copies + 10  # interleaved with the stable one


async def test_clients_of_a_failing_canary_get_the_stable_answer() -> None:
    stable, canary = server(), server(status=500)
    options = {"shadow_share": 0.0, "min_tokens": 0, "stages": "0.5"}
    async with gateway_over(stable, canary=(canary,), canary_options=options) as http:
        for i in range(40):
            assert (await post(http, f"s{i}")).status_code == 200
        page = await record(http)
        assert page["reasons"] == ["more of its sessions have errors"]
        assert len(canary.bodies) < 25


@pytest.mark.parametrize(
    ("status", "state", "reason"),
    [
        (400, "rolled-back", "its answers differ from the stable version's"),
        (500, "rolled-back", "more of its sessions have errors"),
        (503, "shadow", None),
    ],
)
async def test_canary_that_fails_every_copy_is_rolled_back(
    status: int, state: str, reason: str | None
) -> None:
    canary = server(status=status)
    async with gateway_over(
        server(), canary=(canary,), canary_options={"shadow_share": 1.0}
    ) as http:
        for i in range(20):
            assert (await post(http, f"s{i}")).status_code == 200
            await asyncio.sleep(0.01)
        page = await record(http)
        assert (page["state"], next(iter(page["reasons"]), None)) == (state, reason)
        assert (await http.get("/canary/verdict")).status_code == (406 if reason else 200)
    assert (len(canary.bodies) < 20) == (reason is not None)


async def test_canary_whose_streams_cannot_be_compared_has_no_errors() -> None:
    async def answer(_: ScriptedBackend, __: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"\r\n" + chunk(b'data: {"t":10}\n\ndata: [DONE]\n\n'))
        writer.write(b"0\r\n\r\n")

    canary = ScriptedBackend(answer)
    async with gateway_over(
        server(), canary=(canary,), canary_options={"shadow_share": 1.0}
    ) as http:
        for i in range(10):
            await post(http, f"s{i}")
            await asyncio.sleep(0.01)
        page = await record(http)
    assert page["state"] == "shadow" and not page["evidence"] and canary.bodies


async def test_errors_of_both_versions_in_the_shadow_are_no_evidence() -> None:
    rollout, rng = Rollout(RolloutConfig()), random.Random(0)
    for i in range(2000):  # 5 % of requests fail, and of the copies that half of them get
        if rng.random() < 0.05:
            rollout.note_shadow_error("stable", f"s{i}", 0.5)
        elif rng.random() < 0.5 * 0.05:
            rollout.note_shadow_error("canary", f"s{i}", 0.5)
        rollout.note_shadow_error("canary", "one", 0.5)  # of one session, as often as it may
    assert rollout.state == "shadow"


async def test_state_outlives_the_gateway(tmp_path: Path) -> None:
    path, options = tmp_path / "state.json", {"shadow_share": 1.0}
    stable, canary = server(), server([1])
    async with gateway_over(
        stable, canary=(canary,), canary_options={**options, "state": path}
    ) as http:
        await post(http, "a")
        assert (await record(http))["state"] == "rolled-back"
    kept = json.loads(path.read_text())
    kept["canaries"] = ["http://another:1"]
    path.write_text(json.dumps(kept))
    async with gateway_over(
        server(), canary=(server(),), canary_options={**options, "state": path}
    ) as http:
        assert (await record(http))["state"] == "shadow"  # another canary begins again
    path.write_text("{")
    with pytest.raises(BadInput, match="not a state file"):
        async with gateway_over(
            server(), canary=(server(),), canary_options={**options, "state": path}
        ):
            pass


@pytest.mark.parametrize(
    ("stable", "canary", "expected"),
    [
        (((1, 2, 3),), ((1, 2, 3),), (3, 0)),
        (((1, 2, 3),), ((1, 9, 3),), (2, 1)),
        (((1, 2, 3),), ((1, 2),), (3, 1)),
        (((1, 2), (3,)), ((1, 2), (4,)), (3, 1)),
        (((1, 2), (3,)), ((1, 2),), (3, 1)),
    ],
)
def test_answers_are_compared_up_to_their_first_difference(
    stable: Any, canary: Any, expected: tuple[int, int]
) -> None:
    answers = ComparedAnswer(choices=stable), ComparedAnswer(choices=canary)
    assert count_differences(*answers) == expected


def test_texts_of_every_api_are_compared() -> None:
    bodies: list[dict[str, Any]] = [
        {"choices": [{"message": {"content": "hi"}}]},
        {"choices": [{"text": "hi"}]},
        {"content": [{"type": "text", "text": "hi"}]},
        {"output": [{"content": [{"type": "output_text", "text": "hi"}]}]},
    ]
    for body in bodies:
        answer = json_answer(json.dumps(body).encode())
        assert answer is not None and answer.choices == ((104, 105),)
    assert json_answer(b'{"data": []}') is None and json_answer(b"[") is None
