"""What the load client measures equals the script: every case, in virtual time and over TCP."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from ridgeline.measure.client.accepted_prompts import Vocabulary
from ridgeline.measure.client.http_target import HttpTarget, first_model
from ridgeline.measure.client.load_client import LoadOptions, run_load
from ridgeline.measure.goodput_search import is_saturated
from ridgeline.measure.metrics.goodput import goodput, meets
from ridgeline.measure.metrics.latency import e2e_s, itl_s, outcome, tpot_s, ttft_s
from ridgeline.measure.mock.cases import CASES
from ridgeline.measure.mock.pace import MockPace
from ridgeline.measure.mock.server import MockServer
from ridgeline.measure.workload import ChatPrompt, LoadRequest, PromptMessage
from ridgeline.measure.workload.arrivals import Closed, burst, constant
from ridgeline.records import Slo
from tests.measure.memory_transport import connect_to_mock

SLO = Slo.parse("ttft:150 tpot:25")
MS = 1e-3


class Fixed:
    """The same prompt again and again."""

    name = "fixed"

    def __init__(self, prompt="hi there", max_tokens=4):
        self.prompt, self.max_tokens = prompt, max_tokens

    def sample(self, n, seed):
        for i in range(n):
            yield LoadRequest(
                id=f"{seed}-{i}", kind="t", prompt=self.prompt, max_tokens=self.max_tokens
            )


CHAT = ChatPrompt((PromptMessage("user", "hi there"),))


async def measure(server, model, workload, arrivals, count, timeout_s=0.5, **target):
    http = HttpTarget("http://mock:1", model, connect=connect_to_mock(server), **target)
    options = LoadOptions(num_requests=count, timeout_s=timeout_s)
    run = await run_load(http, workload, arrivals, options)
    await http.close()
    return run


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_measured_equals_the_script(in_virtual_time, name, endpoint):
    case = CASES[name]
    if case.chat_only and endpoint != "chat":
        return
    prompt = CHAT if endpoint == "chat" else "hi there"
    run = in_virtual_time(measure(MockServer(), name, Fixed(prompt), constant(1.0), 3))
    for request in run.requests:
        truth = case.truth
        assert outcome(request) == truth.outcome
        assert ttft_s(request) == _about(truth.ttft_s)
        assert tpot_s(request) == _about(truth.tpot_s)
        assert itl_s(request) == _about(list(truth.itl_s))
        assert request.output_tokens == truth.output_tokens == sum(request.token_counts)
        assert meets(request, SLO) == truth.meets
        if truth.outcome == "ok":
            assert e2e_s(request) == _about(truth.e2e_s)
        assert request.counted_by == ("chunks" if name in UNCOUNTED else "server")
    good = goodput(run, SLO)
    assert (good.num_met, good.num_requests) == (3 * truth.meets, 3)


UNCOUNTED = {"no-usage", "no-done", "refused-503", "failed-500"} | {
    "error-event",
    "malformed",
    "cut",
    "ends-early",
    "hang",
}


def _about(value):
    return None if value is None else pytest.approx(value, abs=MS)


def test_a_missing_usage_is_counted_by_the_tokenizer_and_flagged(in_virtual_time):
    def count(text):
        return 2 * len(text.split())

    known = Vocabulary(count_tokens=count)
    run = in_virtual_time(
        measure(MockServer(), "no-usage", Fixed(), constant(1.0), 1, vocabulary=known)
    )
    (found,) = run.requests
    assert (found.counted_by, found.output_tokens, found.token_counts) == ("tokenizer", 8, (2,) * 4)


def test_all_cases_at_once_have_the_scripts_goodput(in_virtual_time):
    """Connections that carry different cases do not disturb each other."""
    names = list(CASES)

    class Each:
        name = "each"

        def sample(self, n, seed):
            for i in range(n):
                yield LoadRequest(id=names[i], kind=names[i], prompt=CHAT, max_tokens=4)

    server = MockServer()

    class ByKind:
        """Sends each request to the script of its kind."""

        name, info = "by kind", None

        def __init__(self):
            self.connect = connect_to_mock(server)
            self.targets = {n: HttpTarget("http://mock:1", n, connect=self.connect) for n in names}

        async def send(self, request, record):
            await self.targets[request.kind].send(request, record)

        def drain_steps(self, now):
            return ()

    async def main():
        return await run_load(
            ByKind(), Each(), burst(), LoadOptions(num_requests=len(names), timeout_s=0.5)
        )

    run = in_virtual_time(main())
    expected = {name for name, case in CASES.items() if case.truth.meets}
    assert {r.kind for r in run.requests if meets(r, SLO)} == expected
    assert goodput(run, SLO).num_met == len(expected)


def test_mock_server_lists_its_scripts_and_rejects_bad_requests(in_virtual_time):
    server = MockServer()

    async def main():
        connect = connect_to_mock(server)
        first = await first_model("http://mock:1", connect=connect)
        from ridgeline.measure.client.http_connection import HttpConnectionPool, Origin

        wire = HttpConnectionPool(Origin("mock", 1), {}, connect)
        bad = await wire.post("/v1/completions", b"{", lambda data: None)
        page = await wire.get("/metrics")
        missing = await wire.get("/nowhere")
        whole = b'{"model": "steady", "max_tokens": 3, "prompt": [1, 2]}'
        got = []
        await wire.post("/v1/completions", whole, got.append)
        return first, bad.status, page.body, missing.status, msgspec.json.decode(b"".join(got))

    first, bad, page, missing, answer = in_virtual_time(main())
    assert (first, bad, missing) == ("steady", 400, 404)
    assert b"vllm:num_requests_running" in page
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3}


def test_slots_make_a_queue_whose_capacity_is_known(in_virtual_time):
    pace = MockPace(ttft_s=0.1, itl_s=0.1, slots=2)  # 0.4 s each: five requests per second

    def at(rate):
        load = measure(MockServer(pace), "steady", Fixed(), constant(rate), 40, timeout_s=60)
        return in_virtual_time(load)

    assert max(map(ttft_s, at(4.9).requests)) == pytest.approx(0.1, abs=0.005)
    assert is_saturated(at(20.0))


async def test_client_times_match_the_servers_over_tcp(request):
    """The least of several delays, since a busy machine may hold up any single one."""
    server = MockServer(MockPace(ttft_s=0.02, itl_s=0.005))
    listening = await server.listen("127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    loop = asyncio.get_running_loop()
    target = HttpTarget(f"http://127.0.0.1:{port}", "steady")
    origin = loop.time()
    run = await run_load(target, Fixed(max_tokens=8), Closed(1), LoadOptions(num_requests=8))
    await target.close()
    listening.close()
    await listening.wait_closed()
    delays = []
    shift = server.served[0].received_s - origin - run.requests[0].sent_s
    for found, given in zip(run.requests, server.served, strict=True):
        assert list(found.token_counts) == given.token_counts
        pairs = zip(found.token_s, given.token_s, strict=True)
        delays.append([client - (server_s - origin) for client, server_s in pairs])
    least = [min(column) for column in zip(*delays, strict=True)]
    assert max(least) - min(least) < MS
    assert abs(shift) < 5
