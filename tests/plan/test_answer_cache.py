"""Response caches and pinned prefixes in simulations and plans, against the server's own cache."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from ridgeline.cli.main import main
from ridgeline.engine.scheduler.admission.limits import SchedulerLimits
from ridgeline.engine.scheduler.batching import make_policy
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.prefix_cache import PrefixCache
from ridgeline.engine.scheduler.kv.prefix_pins import PrefixPins
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import load_catalogue
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.plan.fleet.demand import PinnedPrefixes, StoredAnswers, demand_of
from ridgeline.plan.fleet.disaggregate import DisaggregatedPools, _decode_batches, smallest_pools
from ridgeline.plan.simulate.answer_cache import (
    ENTRY_BYTES,
    HIT_S,
    TOKEN_BYTES,
    AnswerCache,
    hit_s,
)
from ridgeline.plan.simulate.fleet import simulate_fleet
from ridgeline.plan.simulate.records import (
    FleetConfig,
    FleetOutcome,
    ReplicaConfig,
    SimulatedRequest,
)
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.replica import build_replica
from ridgeline.records import Finished, Slo, Started, Token, Usage
from ridgeline.serve.response_cache.cache import ResponseCache
from tests.plan.constant_step_times import ConstantStepTimes

STEP_S = 0.01
COMMAND = ["--accelerator", "l4", "--slo", "ttft:2000 tpot:100", "--json"]


def events(num_output: int) -> list[Started | Token | Finished]:
    """An answer of tokens like those of the demo model."""
    name = f"cmpl-{'0' * 32}-0"
    usage = Usage(prompt_tokens=100, cached_tokens=0, completion_tokens=num_output)
    made: list[Started | Token | Finished] = [Started(request_id=name, at_s=1.5, cached_tokens=0)]
    for i in range(num_output):
        made.append(Token(request_id=name, index=0, token=1000 + i, text=" word", at_s=1.5))
    return [*made, Finished(request_id=name, index=0, reason="length", at_s=2.5, usage=usage)]


@pytest.mark.parametrize("num_output", [16, 64, 256])
def test_stored_answer_takes_as_many_bytes_as_in_the_server(num_output: int) -> None:
    cache = ResponseCache(1 << 30, 10.0, lambda: 0.0)
    cache.store(b"key", "", [events(num_output)])
    assert cache.num_bytes == pytest.approx(ENTRY_BYTES + TOKEN_BYTES * num_output, rel=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_same_hits_as_the_servers_cache(seed: int) -> None:
    """The same requests at the same times, with bounds of as many answers and a time to live."""
    now_s = 0.0
    real = ResponseCache(1 << 30, 5.0, lambda: now_s)
    real.store(b"size", "", [events(8)])
    one, rng = real.num_bytes, random.Random(seed)
    real = ResponseCache(8 * one, 5.0, lambda: now_s)
    simulated = AnswerCache(8 * (ENTRY_BYTES + 8 * TOKEN_BYTES), 5.0)
    hits = 0
    for _ in range(400):
        now_s += rng.random()
        key = rng.randrange(7)
        found = real.find(bytes([key])) is not None
        assert simulated.find(key, now_s) == found
        hits += found
        if not found:
            real.store(bytes([key]), "", [events(8)])
            simulated.store(key, 8, now_s)
    assert 50 < hits < 350


def make_scheduler(num_blocks: int = 64, pin_share: float = 0.5) -> Scheduler:
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=512, max_model_len=1024)
    pool = BlockPool(num_blocks, 16)
    cache = PrefixCache(pool)
    cache.pins = PrefixPins(int(pin_share * num_blocks))
    return Scheduler(limits, make_policy("continuous"), pool, cache)


def run(requests: list[SimulatedRequest], **more: object) -> FleetOutcome:
    replica = ReplicaConfig(
        name="test", scheduler=make_scheduler, step_times=ConstantStepTimes(STEP_S)
    )
    config = FleetConfig(replicas=(replica,), **more)  # type: ignore[arg-type]
    return simulate_fleet(requests, config)


def test_repeated_answer_takes_milliseconds_and_no_step() -> None:
    same = [
        SimulatedRequest(at_s=float(i), num_prompt=100, num_output=20, answer=0) for i in range(3)
    ]
    outcome = run(same, answers=lambda: AnswerCache(1 << 20, 1.5))
    first, second, third = outcome.requests
    assert [r.answered for r in outcome.requests] == [False, True, False]  # the last one too late
    assert first.finished_s == pytest.approx(20 * STEP_S)
    assert second.first_s - 1.0 == pytest.approx(HIT_S)
    assert second.finished_s - 1.0 == pytest.approx(hit_s(20))
    assert third.finished_s - 2.0 == pytest.approx(20 * STEP_S)
    assert outcome.num_steps == 40


def test_answer_that_is_not_finished_is_computed_twice() -> None:
    same = [
        SimulatedRequest(at_s=i / 100, num_prompt=100, num_output=20, answer=0) for i in range(2)
    ]
    outcome = run(same, answers=lambda: AnswerCache(1 << 20, 100.0))
    assert not any(r.answered for r in outcome.requests)


def test_similar_question_costs_its_embedding() -> None:
    similar = SimulatedRequest(at_s=0.0, num_prompt=900, num_output=20, answered=True, question=600)
    outcome = run([similar])
    (only,) = outcome.requests
    assert only.answered and outcome.num_steps == 2  # 600 tokens in steps of 512
    assert only.finished_s == pytest.approx(2 * STEP_S + hit_s(20))


def test_questions_to_embed_have_nothing_in_common() -> None:
    similar = [
        SimulatedRequest(
            at_s=float(i),
            num_prompt=300,
            num_output=4,
            answered=True,
            question=100,
            prefix=(0,),
            prefix_block=256,
            pinned=256,
        )
        for i in range(3)
    ]
    pools: set[BlockPool] = set()
    outcome = run(similar, check=lambda scheduler: pools.add(scheduler.pool))
    assert [r.cached for r in outcome.requests] == [0, 0, 0]
    (pool,) = pools
    assert not pool._pinned


@pytest.mark.parametrize(("pinned", "cached"), [(0, 0), (256, 256)])
def test_pinned_prefix_is_found_behind_others_that_fill_the_cache(pinned: int, cached: int) -> None:
    system = SimulatedRequest(
        at_s=0.0, num_prompt=300, num_output=4, prefix=(0,), prefix_block=256, pinned=pinned
    )
    others = [SimulatedRequest(at_s=1.0 + i, num_prompt=600, num_output=4) for i in range(8)]
    outcome = run([system, *others, msgspec.structs.replace(system, at_s=60.0)])
    assert outcome.requests[-1].cached == cached


def simulated(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, float]:
    load = ["--request-rate", "1", "--num-prompts", "400", "--output-len", "64"]
    assert main(["simulate", "llama-3.1-8b", *COMMAND, *load, *more]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_shares_of_a_simulated_load_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    plain = simulated(capsys)
    exact = simulated(capsys, "--response-cache-share", "0.5")
    similar = simulated(capsys, "--semantic-cache-share", "0.5", "--question-len", "512")
    assert exact["answered_share"] == similar["answered_share"] == pytest.approx(0.5, abs=0.05)
    assert exact["utilisation"] < similar["utilisation"] < plain["utilisation"]
    pinned = simulated(capsys, "--enable-prefix-caching", "--pinned-len", "512")
    assert pinned["hit_share"] == pytest.approx(0.5, abs=0.01)
    assert pinned["utilisation"] < plain["utilisation"]


def test_recorded_prompts_that_repeat_are_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"timestamp": 20_000 * i, "input_length": 900, "output_length": 8, "hash_ids": [9, i % 3]}
        for i in range(30)
    ]
    recorded = tmp_path / "trace.jsonl"
    recorded.write_text("\n".join(map(json.dumps, lines)))
    asked = ["simulate", "llama-3.1-8b", *COMMAND, "--workload", f"mooncake:{recorded}"]
    asked += ["--replay-speed", "1", "--response-cache-size"]
    for size, ttl, share in (("1MiB", "1h", 0.9), ("1MiB", "30s", 0.0), ("1500", "1h", 0.0)):
        assert main([*asked, size, "--response-cache-ttl", ttl]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["answered_share"] == pytest.approx(share), (size, ttl)


def test_recorded_prompts_with_ends_that_are_not_recorded_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = tmp_path / "trace.jsonl"
    asked = ["simulate", "llama-3.1-8b", *COMMAND, "--workload", f"mooncake:{recorded}"]
    asked += ["--replay-speed", "1", "--response-cache-size", "1MiB"]
    for num_prompt, share in ((1024, 0.9), (1025, 0.0)):  # two blocks of 512
        row = {"input_length": num_prompt, "output_length": 8, "hash_ids": [9, 8]}
        recorded.write_text(
            "\n".join(json.dumps({"timestamp": 20_000 * i, **row}) for i in range(10))
        )
        assert main(asked) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["answered_share"] == pytest.approx(share), num_prompt


def test_background_tokens_are_of_steps_with_interactive_requests(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fewer of them: batch requests wait longer, and interactive ones are faster."""
    mixed = ["--batch-share", "0.5"]
    many, few = (simulated(capsys, *mixed, "--background-tokens", n) for n in ("2048", "8"))
    assert many["batch"]["e2e"]["p50"] < few["batch"]["e2e"]["p50"]  # type: ignore[index]
    assert many["tpot"]["p50"] > few["tpot"]["p50"]  # type: ignore[index]


def planned(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, float]:
    asked = ["plan", "llama-3.1-8b", *COMMAND, "--request-rate", "20", "--max-devices", "1"]
    assert main([*asked, *more]) == 0
    return json.loads(capsys.readouterr().out)["fleets"][0]  # type: ignore[no-any-return]


def test_plan_needs_fewer_replicas_where_caches_answer(capsys: pytest.CaptureFixture[str]) -> None:
    plain = planned(capsys)
    exact = planned(capsys, "--response-cache-share", "0.4")
    similar = planned(capsys, "--semantic-cache-share", "0.4", "--question-len", "256")
    assert exact["rate"] == plain["rate"] > similar["rate"]  # embeddings take their time
    assert exact["num_replicas"] < plain["num_replicas"]
    pinned = planned(capsys, "--pinned-len", "512")
    several = planned(capsys, "--pinned-len", "512", "--pinned-prefixes", "40")
    assert pinned["num_replicas"] < plain["num_replicas"]
    assert pinned["kv_tokens"] - several["kv_tokens"] == 39 * 512


def test_break_even_is_in_requests_of_which_a_part_is_computed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At a price of 1.5 times what a full replica saves, half of the answers must be stored."""
    asked = ["plan", "llama-3.1-8b", *COMMAND, "--request-rate", "20", "--max-devices", "1"]

    def bill(price: float, *more: str) -> tuple[float | None, float]:
        assert main([*asked, "--price-per-hour", str(price), *more]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["bill"]["break_even_rate"], found["fleets"][0]["rate"]

    rate, full = bill(0.01)
    assert rate is not None
    price = 0.01 * 1.5 * full / rate
    assert bill(price)[0] is None
    found, _ = bill(price, "--response-cache-share", "0.5")
    assert found == pytest.approx(1.5 * full)


def test_split_pools_embed_questions_and_keep_pinned_prefixes() -> None:
    machine = build_replica(
        load_planning_spec("llama-3.1-8b"), load_catalogue()["l4"], Layout(), kv_dtype="bfloat16"
    )
    slo, plain = Slo.parse("ttft:4000 tpot:100"), demand_of([(1024, 128)], 20.0)
    answers = StoredAnswers(similar=0.3, question=512)

    def split(**more: object) -> DisaggregatedPools:
        found = smallest_pools((machine,), msgspec.structs.replace(plain, **more), slo)
        assert found is not None
        return found

    assert split(answers=answers).prefill_s > split().prefill_s
    assert split(pinned=PinnedPrefixes(tokens=512)).prefill_s < split().prefill_s

    def num_batches(count: int) -> int:
        """Of prompts of several lengths, how many batch sizes fit."""
        pinned = PinnedPrefixes(tokens=16, count=count)
        loads = [demand_of([(isl, 128)], 1.0) for isl in range(600, 1600, 100)]
        return sum(
            len(list(_decode_batches(machine, msgspec.structs.replace(load, pinned=pinned))))
            for load in loads
        )

    assert num_batches(1) > num_batches(400) > num_batches(10_000) == 0


def test_demand_of_what_is_computed() -> None:
    demand = msgspec.structs.replace(
        demand_of([(1000, 100)], 10.0),
        answers=StoredAnswers(exact=0.25, similar=0.25, question=60),
        pinned=PinnedPrefixes(tokens=400),
    )
    assert demand.computed_rate == 5.0
    assert demand.computed_isl == 1090  # three questions for each two computed requests
    assert demand.found == 400
    lane = msgspec.structs.replace(demand, batch_rate=1.0, mean_rate=4.0, background_tokens=70)
    assert demand.replicas_at(1.0, 0.1) == 5
    assert lane.replicas_at(10.0, 0.1) == 1  # 70 tokens a step are a request of 700 a second
    assert lane.replicas_at(10.0, 0.2) == 2
    with pytest.raises(BadInput, match="nothing to plan for"):
        StoredAnswers(exact=0.5, similar=0.5)


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("simulate", "--response-cache-share 0.6 --semantic-cache-share 0.6", "exceed"),
        ("simulate", "--question-len 9", "no effect"),
        ("simulate", "--response-cache-ttl 9", "no effect"),
        ("simulate", "--response-cache-size 1MiB", "recorded traffic"),
        ("simulate", "--response-cache-size 1MiB --response-cache-share 0.1", "leave one"),
        ("simulate", "--response-cache-share 0.1 --replicas 2 --decode-replicas 1", "cannot be"),
        ("simulate", "--pinned-len 9", "no effect without --enable-prefix-caching"),
        ("simulate", "--pinned-prefixes 2", "no effect"),
        ("simulate", "--prefix-pin-share 0.2", "no effect"),
        ("simulate", "--background-tokens 2", "no effect"),
        ("plan", "--background-tokens 2", "no effect"),
        ("plan", "--question-len 9", "no effect"),
        ("plan", "--pinned-prefixes 2", "no effect"),
        ("plan", "--pinned-len 1024", "leaves nothing"),
        ("plan", "--pinned-len 512 --kv-tier-memory-share 0.5", "leave nothing"),
        ("plan", "--response-cache-share 1", "nothing to plan for"),
    ],
)
def test_options_without_an_effect_are_refused(
    command: str, flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "llama-3.1-8b", "--accelerator", "l4", *flags.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
