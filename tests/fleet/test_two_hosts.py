"""A fleet over two hosts, one of them a network namespace: blocks over TCP, and a cut cable.

Needs root, `ip netns` and a minute: `make test-hosts`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("RIDGELINE_HOSTS" not in os.environ, reason="needs root: make test-hosts"),
]

HERE, THERE, KEY = "10.77.0.1", "10.77.0.2", "key-of-the-fleet"
NAMESPACE, CABLE, OTHER_END = "ridgeline-there", "ridgeline-a", "ridgeline-b"
LONG = "def sub(a, b): return a - b # " * 60


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


@pytest.fixture(scope="module")
def cable() -> Iterator[None]:
    """A second host with another address, and a cable to it."""
    ip("netns", "del", NAMESPACE, check=False)
    ip("netns", "add", NAMESPACE)
    try:
        ip("link", "add", CABLE, "type", "veth", "peer", "name", OTHER_END)
        ip("link", "set", OTHER_END, "netns", NAMESPACE)
        ip("addr", "add", f"{HERE}/24", "dev", CABLE)
        ip("link", "set", CABLE, "up")
        ip("-n", NAMESPACE, "addr", "add", f"{THERE}/24", "dev", OTHER_END)
        for device in (OTHER_END, "lo"):
            ip("-n", NAMESPACE, "link", "set", device, "up")
        yield
    finally:
        ip("link", "del", CABLE, check=False)
        ip("netns", "del", NAMESPACE, check=False)


class Hosts:
    """Processes on both hosts, and a client of them here."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        headers = {"authorization": f"Bearer {KEY}"}
        self.http = stack.enter_context(httpx.Client(headers=headers, timeout=120))

    def start(self, host: str, *words: str) -> None:
        """`ridgeline WORDS` on one of the hosts."""
        inside = ["ip", "netns", "exec", NAMESPACE] if host == THERE else []
        command = [*inside, sys.executable, "-m", "ridgeline", *words, "--host", host]
        environment = {**os.environ, "RIDGELINE_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        self._stack.callback(process.wait, 30)
        self._stack.callback(process.kill)

    def await_ready(self, gateway: str) -> None:
        """Until every backend of the gateway is ready."""
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s:
            try:
                view = self.http.get(f"{gateway}/ridgeline/fleet").json()
            except httpx.HTTPError:
                view = {"backends": [{"state": "starting"}]}
            if all(backend["state"] == "ready" for backend in view["backends"]):
                return
            time.sleep(0.2)
        raise AssertionError(f"not every backend is ready: {view}")

    def stream(self, gateway: str, prompt: str, num_tokens: int, **fields: Any) -> str:
        """The events of a stream, but for their ids and times."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": num_tokens, "stream": True}
        reply = self.http.post(
            f"{gateway}/v1/completions", json={**body, "ignore_eos": True, **fields}
        )
        assert reply.status_code == 200 and reply.text.rstrip().endswith("[DONE]"), reply.text
        return "".join(part.split('"text":')[-1] for part in reply.text.split("data: ")[1:])

    def metric(self, server: str, name: str) -> float:
        lines = self.http.get(f"{server}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.fixture
def hosts(cable: None) -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(stack)


def test_streams_go_on_when_the_cable_to_their_server_is_cut(hosts: Hosts) -> None:
    gateway = f"http://{HERE}:8190"
    hosts.start(THERE, "serve", "demo", "--port", "8101")
    hosts.start(HERE, "serve", "demo", "--port", "8102")
    backends = ("--backend", f"http://{THERE}:8101", "--backend", f"http://{HERE}:8102")
    hosts.start(HERE, "route", "--port", "8190", "--silence-s", "2", *backends)
    hosts.await_ready(gateway)

    def answer(seed: int) -> str:
        return hosts.stream(gateway, f"def f{seed}(", 600, temperature=0.8, seed=seed)

    with ThreadPoolExecutor(4) as pool:
        expected = list(pool.map(answer, range(4)))
        answers = pool.map(answer, range(4))
        deadline_s = time.monotonic() + 20
        while not hosts.metric(gateway, f'ridgeline_fleet_in_flight{{backend="http://{THERE}'):
            assert time.monotonic() < deadline_s
        time.sleep(0.3)
        ip("link", "set", CABLE, "down")
        try:
            assert list(answers) == expected
        finally:
            ip("link", "set", CABLE, "up")
    assert hosts.metric(gateway, "ridgeline_fleet_resumed_total") >= 1
    assert hosts.metric(gateway, "ridgeline_fleet_lost_total") == 0
    hosts.await_ready(gateway)


def test_blocks_of_a_prompt_reach_the_other_host_over_tcp(hosts: Hosts) -> None:
    gateway, decode = f"http://{HERE}:8191", f"http://{THERE}:8104"
    tcp = ("--disaggregation-transfer-backend", "tcp")
    address = ("--disaggregation-host", HERE, "--disaggregation-port", "8998")
    hosts.start(
        HERE, "serve", "demo", "--port", "8103", "--disaggregation-mode", "prefill", *tcp, *address
    )
    peers = ("--disaggregation-peers", f"{HERE}:8998")
    hosts.start(
        THERE, "serve", "demo", "--port", "8104", "--disaggregation-mode", "decode", *tcp, *peers
    )
    pools = ("--prefill-backend", f"http://{HERE}:8103", "--decode-backend", decode)
    hosts.start(HERE, "route", "--port", "8191", *pools)
    hosts.await_ready(gateway)
    through_both = hosts.stream(gateway, LONG, 20, temperature=0)
    assert hosts.metric(decode, "ridgeline_kv_transfer_fetched_bytes_total") > 1e6
    assert hosts.metric(decode, "ridgeline_kv_transfer_fallbacks_total") == 0
    assert through_both == hosts.stream(f"http://{HERE}:8103", LONG, 20, temperature=0)
