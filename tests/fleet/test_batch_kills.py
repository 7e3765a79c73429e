"""kill -9 of the server with a batch, behind the gateway: it goes on when the server is back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet.processes import GatewayProcess, Replica, wait_until
from tests.serve.batch.helpers import jsonl


def line(number: int) -> dict[str, Any]:
    body = {"model": "demo", "prompt": f"def f{number}(", "max_tokens": 150, "ignore_eos": True}
    url = "/v1/completions"
    return {"custom_id": str(number), "method": "POST", "url": url, "body": body | {"seed": number}}


@pytest.mark.slow
def test_batch_of_a_killed_server_goes_on_when_it_is_back(tmp_path: Path) -> None:
    replicas = [Replica(batch_store=str(tmp_path / f"{i}.sqlite")) for i in range(2)]
    for replica in replicas:
        replica.start()
    gateway = GatewayProcess([replica.url for replica in replicas])
    try:
        for replica in replicas:
            replica.wait_ready()
        with httpx.Client(base_url=gateway.url, timeout=60) as http:
            wait_until(lambda: len(ready(http)) == 2)
            lines = [line(number) for number in range(30)]
            reply = http.post(
                "/v1/files", files={"file": ("in.jsonl", jsonl(*lines))}, data={"purpose": "batch"}
            )
            assert reply.status_code == 200, reply.text
            batch = http.post(
                "/v1/batches",
                json={
                    "input_file_id": reply.json()["id"],
                    "endpoint": "/v1/completions",
                    "completion_window": "24h",
                },
            ).json()
            path = f"/v1/batches/{batch['id']}"
            wait_until(lambda: http.get(path).json()["request_counts"]["completed"] >= 1)
            owner = next(r for r in replicas if httpx.get(r.url + path).status_code == 200)
            other = next(r for r in replicas if r is not owner)
            owner.kill()
            gone = http.get(path)
            assert gone.status_code == 503 and owner.url in gone.text
            assert gone.json()["error"]["type"] == "ServiceUnavailableError"
            assert http.post("/v1/completions", json=lines[0]["body"]).status_code == 200
            owner.start()
            wait_until(lambda: http.get(path).json().get("status") == "completed")
            found = http.get(path).json()
            assert found["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
            output = http.get(f"/v1/files/{found['output_file_id']}/content").text
            for result, sent in zip(map(json.loads, output.splitlines()), lines, strict=True):
                expected = httpx.post(other.url + sent["url"], json=sent["body"], timeout=60).json()
                assert result["custom_id"] == sent["custom_id"]
                text = result["response"]["body"]["choices"][0]["text"]
                assert text == expected["choices"][0]["text"]
    finally:
        gateway.stop()
        for replica in replicas:
            replica.kill()


def ready(http: httpx.Client) -> list[str]:
    try:
        backends = http.get("/ridgeline/fleet").json()["backends"]
    except httpx.HTTPError:
        return []
    return [backend["url"] for backend in backends if backend["state"] == "ready"]
