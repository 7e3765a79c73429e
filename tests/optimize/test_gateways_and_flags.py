"""What real deployments have: one slot, flags already set, keys, and rate limits."""

from __future__ import annotations

import re
from types import SimpleNamespace

import msgspec
import pytest

from ridgeline.diagnose.rules.rulebook import shipped_rules
from ridgeline.errors import CannotRun
from ridgeline.optimize.drivers.server_process import ServerCommand, replace_flags
from ridgeline.optimize.external import server_deployment
from ridgeline.optimize.external.server_deployment import check_rate_limit, post
from ridgeline.optimize.external.server_flags import ServerFlags, load_server_flags
from ridgeline.optimize.ladder import load_default_ladder, unmet_need
from ridgeline.optimize.time_budget import MAX_ROUNDS, MIN_ROUNDS, MIN_TRIALS, TimeBudget
from ridgeline.records import RequestTrace, RunTrace

SERVERS = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llama-server"}
WORST = {
    "batching": "continuous",
    "max_num_seqs": 1,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": True,
    "speculative_config": None,
    "shared_prompt_share": 0.5,
    "kv_cache_dtype": "auto",
    "quantization": None,
}


def setting_of(flags: ServerFlags, word: str) -> str | None:
    """The setting that a flag of the server changes."""
    for name, flag in flags.flags.items():
        spellings = flag.values() if isinstance(flag, dict) else [flag]
        if any(word in text.split() for text in spellings):
            return name
    return None


@pytest.mark.parametrize("server", SERVERS)
def test_every_finding_with_a_flag_has_a_rung_that_would_be_tried(server: str) -> None:
    flags, rungs = load_server_flags()[SERVERS[server]], load_default_ladder().rungs
    for cause in shipped_rules():
        for word in re.findall(r"(?<![\w-])--?[a-z][\w-]*", cause.flag.get(server, "")):
            setting = setting_of(flags, word)
            if setting is None:
                continue
            changing = [
                rung for rung in rungs if setting in rung.changes or any(
                    setting in variant for variant in rung.variants
                )
            ]  # fmt: skip
            worst = WORST | ({"batching": "static"} if setting == "batching" else {})
            assert any(unmet_need(rung, worst) is None for rung in changing), (cause.id, setting)


@pytest.mark.parametrize("slots", [1, 2, 64])
def test_every_number_of_slots_can_be_raised(slots: int) -> None:
    facts = WORST | {"max_num_seqs": slots}
    raising = [
        rung.id
        for rung in load_default_ladder().rungs
        if any("max_num_seqs" in variant for variant in rung.variants)
        and unmet_need(rung, facts) is None
    ]
    assert raising


@pytest.mark.parametrize(
    ("command", "flags", "expected"),
    [
        ("s --max-num-seqs 4 {flags}", "--max-num-seqs 64", "s --max-num-seqs 64"),
        ("s --max-num-seqs=4 -x {flags}", "--max-num-seqs 64", "s --max-num-seqs=64 -x"),
        ("s -np 1 --port {port} {flags}", "-np 8 --new 2", "s -np 8 --port 8000 --new 2"),
        ("s --no-cache {flags} tail", "--cache", "s --cache tail"),
        ("s --cache {flags}", "--no-cache", "s --no-cache"),
        ("env A=1 s --n 1 --m 2 --n 3 {flags}", "--n 9", "env A=1 s --n 9 --m 2"),
        ("s {flags}", "--a 1 --b", "s --a 1 --b"),
    ],
)
def test_flag_is_replaced_where_it_stands(command: str, flags: str, expected: str) -> None:
    url = "http://127.0.0.1:{port}" if "{port}" in command else "http://127.0.0.1:1"
    words = ServerCommand(url=url, command=command).words(flags.split(), 8000)
    assert " ".join(words) == expected


def test_no_flag_changes_nothing() -> None:
    assert replace_flags(["s", "--a", "1"], []) == (["s", "--a", "1"], [])


def limited_run(num_limited: int) -> RunTrace:
    request = RequestTrace(
        id="0",
        kind="chat",
        scheduled_s=0.0,
        sent_s=0.0,
        started_s=None,
        token_s=(),
        token_counts=(),
        finished_s=0.1,
        prompt_tokens=1,
        cached_tokens=0,
        output_tokens=0,
        requested_tokens=8,
        finish_reason=None,
        error="HTTP 429: slow down",
    )
    served = msgspec.structs.replace(request, error=None)
    requests = tuple(request if i < num_limited else served for i in range(10))
    return RunTrace(
        target="t",
        workload="w",
        arrivals="poisson:3",
        seed=0,
        started_unix_s=0.0,
        duration_s=1.0,
        requests=requests,
    )


def test_run_decided_by_a_rate_limit_is_an_error_that_says_so() -> None:
    with pytest.raises(CannotRun, match=r"limits the rate of requests.*HTTP 429"):
        check_rate_limit(limited_run(8), 3.0)
    check_rate_limit(limited_run(1), 3.0)


async def test_a_single_request_waits_as_long_as_the_rate_limit_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replies = [(429, {"retry-after": "7"}), (429, {}), (200, {})]
    waits: list[float] = []

    class Pool:
        async def post(self, path, body, sink):  # type: ignore[no-untyped-def]
            status, headers = replies.pop(0)
            if status == 200:
                sink(b'{"ok": true}')
            return SimpleNamespace(status=status, headers=headers, body=b"")

        def close(self) -> None: ...

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(server_deployment, "connection_pool", lambda url, key: (Pool(), ""))
    monkeypatch.setattr(server_deployment.asyncio, "sleep", sleep)
    assert await post("http://x", "/v1/completions", {}, "key") == {"ok": True}
    assert waits == [7.0, 1.0]


def test_short_budget_has_room_for_three_trials() -> None:
    """4m30s on two cores: an answer of the small chat model takes two seconds alone."""
    clock = iter(float(i) * 0 for i in range(10_000))
    budget = TimeBudget(262.0, lambda: next(clock))
    budget.choose_window(2.0)
    budget.note_open(2.0)
    for _ in range(6):
        budget.note_run(budget.window_s + 1.1)
    search_s = 8 * budget.run_cost_s
    trials_s = MIN_TRIALS * budget.trial_cost_s
    assert search_s + trials_s + budget.closing_cost_s < 262.0
    assert MIN_ROUNDS <= budget.max_rounds(0) <= budget.max_rounds(2) <= MAX_ROUNDS


def test_reserve_counts_the_long_runs_of_a_slow_baseline() -> None:
    budget = TimeBudget(290.0, lambda: 0.0)
    budget.note_open(2.0)
    for _ in range(6):
        budget.note_run(8.0)
    budget.note_baseline(100.0)
    for _ in range(6):
        budget.note_run(3.0)
    assert budget.run_cost_s == 3.0
    assert budget.closing_cost_s >= 2.0 + MIN_ROUNDS * (8.0 + 3.0)


def test_reserve_has_the_windows_of_the_load_that_the_baseline_holds() -> None:
    """Its first runs are at higher loads, with shorter windows, than the rounds of the closing."""
    budget = TimeBudget(900.0, lambda: 0.0)
    budget.choose_window(2.0)
    for _ in range(6):
        budget.note_run(9.0)
    budget.note_baseline(10.0)
    short_s = budget.closing_cost_s
    rate = 0.4
    budget.note_baseline(rate)  # measured in the rounds of a trial
    longer_s = budget.window_for(rate) - budget.window_for(10.0)
    assert longer_s > 5.0
    assert budget.closing_cost_s == pytest.approx(short_s + MIN_ROUNDS * longer_s)
    budget.note_baseline(10.0)
    assert budget.closing_cost_s == pytest.approx(short_s + MIN_ROUNDS * longer_s)


def test_resumed_search_has_the_reserve_of_the_interrupted_one() -> None:
    budget = TimeBudget(900.0, lambda: 0.0)
    budget.choose_window(2.0)
    budget.note_warm_up(20.0)
    budget.note_run(9.0)
    budget.note_baseline(0.4)
    resumed = TimeBudget(900.0, lambda: 0.0)
    resumed.restore(budget.state)
    assert resumed.closing_cost_s == budget.closing_cost_s
    for search in (budget, resumed):
        search.note_baseline(0.3)
    assert resumed.closing_cost_s == budget.closing_cost_s


def test_reserve_holds_the_warm_up_of_the_baseline() -> None:
    """A server that answers slowly takes as long to warm up again for the closing comparison."""
    budget = TimeBudget(330.0, lambda: 0.0)
    budget.note_open(0.5)
    reserve_s, trial_s = budget.closing_cost_s, budget.trial_cost_s
    budget.note_warm_up(20.0)
    budget.note_warm_up(3.0)  # of a server that is asked again
    budget.note_open(0.4)
    assert budget.closing_cost_s == pytest.approx(reserve_s + 20.0)
    assert budget.trial_cost_s == pytest.approx(trial_s + 30.0)
