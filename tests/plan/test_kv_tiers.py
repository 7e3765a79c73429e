"""Tiers of the KV cache in predictions, plans and simulations: loaded where that is cheaper."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from ridgeline.cli.main import main
from ridgeline.engine.scheduler.admission.limits import SchedulerLimits
from ridgeline.engine.scheduler.batching import make_policy
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.cache_tiers import CacheTiers, TierTotals
from ridgeline.engine.scheduler.kv.prefix_cache import PrefixCache
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import load_catalogue
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.plan.fleet.demand import Demand
from ridgeline.plan.fleet.search import SearchSpace, search
from ridgeline.plan.simulate.kv_tiers import TierSizes, add_tiers
from ridgeline.plan.simulate.single import Arrival, simulate
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.predict import predict
from ridgeline.plan.step_time.tier_loads import TierHits
from ridgeline.records import Slo

TOKEN_S, STEP_S = 0.001, 0.01
BLOCK_BYTES = 16_000
POINT = OperatingPoint(model="llama-3.1-8b", device="h100-sxm", isl=8192, osl=128, batch=4)


def step_s(shapes: object, num_sampled: int) -> float:
    return STEP_S + TOKEN_S * sum(new for new, _ in shapes if new > 1)  # type: ignore[attr-defined]


def returning(sizes: TierSizes, num_others: int = 1) -> list[tuple[float, int]]:
    """(TTFT, cached tokens) of a conversation, of others that evict it, and of its return."""
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=1024, max_model_len=608)
    pool = BlockPool(38, 16)
    scheduler = Scheduler(limits, make_policy("continuous"), pool, PrefixCache(pool))
    add_tiers(scheduler, sizes, BLOCK_BYTES)
    starts = [*(1000 * i for i in range(1 + num_others)), 0]
    arrivals = [
        Arrival(at_s=10.0 * i, prompt=tuple(range(start, start + 600)), num_output=4)
        for i, start in enumerate(starts)
    ]
    trace = simulate(scheduler, arrivals, step_s, end_s=1000.0)
    assert all(request.error is None for request in trace.requests)
    return [(r.token_s[0] - r.sent_s, r.cached_tokens) for r in trace.requests]


def test_returning_conversation_is_loaded_from_simulated_memory() -> None:
    (plain, _), _, (again, cached) = returning(TierSizes())
    assert cached == 0 and again == pytest.approx(plain)
    *_, (loaded, cached) = returning(TierSizes(memory_bytes=100 * BLOCK_BYTES, memory_bytes_s=1e8))
    assert cached == 592
    # The step computes 8 tokens, copies 37 blocks in, and as many out to make room.
    assert loaded == pytest.approx(STEP_S + 8 * TOKEN_S + 74 * BLOCK_BYTES / 1e8)


def test_returning_conversation_waits_for_simulated_files() -> None:
    sizes = TierSizes(
        memory_bytes=80 * BLOCK_BYTES,
        file_bytes=1000 * BLOCK_BYTES,
        memory_bytes_s=1e12,
        file_bytes_s=1e7,
    )
    *_, (loaded, cached) = returning(sizes, num_others=4)
    assert cached == 592
    read_s = 0.001 + 37 * BLOCK_BYTES / 1e7
    assert loaded == pytest.approx(read_s + STEP_S + 8 * TOKEN_S, rel=1e-3)
    *_, (_, lost) = returning(msgspec.structs.replace(sizes, file_bytes=None), num_others=4)
    assert lost < 592 / 2  # most of it was displaced


def test_slow_tier_is_declined_as_in_the_engine() -> None:
    slow = TierSizes(memory_bytes=100 * BLOCK_BYTES, memory_bytes_s=BLOCK_BYTES / 0.05)
    (plain, _), (evicting, _), (_, cached) = returning(slow)
    assert cached == 0
    assert evicting > plain  # blocks are saved before anybody knows whether they come back


def totals_of(starts: list[int]) -> TierTotals:
    """What was moved while prompts of 600 tokens come one after another; equal starts, equal
    prompts, of 37 blocks. The tier holds 1,000 blocks, the cache 38."""
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=1024, max_model_len=608)
    pool = BlockPool(38, 16)
    scheduler = Scheduler(limits, make_policy("continuous"), pool, PrefixCache(pool))
    add_tiers(scheduler, TierSizes(memory_bytes=1000 * BLOCK_BYTES), BLOCK_BYTES)
    arrivals = [
        Arrival(at_s=10.0 * i, prompt=tuple(range(start, start + 600)), num_output=4)
        for i, start in enumerate(starts)
    ]
    simulate(scheduler, arrivals, step_s, end_s=1e4)
    assert isinstance(scheduler.cache.tiers, CacheTiers)
    return scheduler.cache.tiers.totals


NEW = [1000 * i for i in range(42)]


def test_saving_ends_when_nothing_came_back() -> None:
    assert 4 * 38 <= totals_of(NEW).stored_blocks <= 5 * 38
    twice = [start for start in NEW for _ in range(2)]  # hit in the pool, and so proven
    assert totals_of(twice).stored_blocks >= 40 * 37


def test_first_return_is_found() -> None:
    assert totals_of([0, 1000, 2000, 3000, 0]).loaded_blocks == 37


def test_saving_goes_on_once_an_evicted_block_is_asked_for() -> None:
    late = [*NEW, 30_000]  # evicted long ago, and not saved
    assert totals_of(late).loaded_blocks == 0
    again = totals_of([*late, 100_000, 200_000, 100_000, 30_000])
    assert again.loaded_blocks == 2 * 37
    assert again.stored_blocks >= totals_of(NEW).stored_blocks + 3 * 37


def test_prediction_loads_from_memory_what_is_cheaper_than_computing() -> None:
    plain, full = predict(POINT), predict(msgspec.structs.replace(POINT, cached=6000))
    tiers = TierHits(memory_tokens=6000, memory_bytes_s=50e9)
    loaded = predict(msgspec.structs.replace(POINT, tiers=tiers))
    assert loaded.tiers is not None and loaded.tiers.tokens == 6000
    assert full.ttft_ms < loaded.ttft_ms < plain.ttft_ms
    assert loaded.tiers.copy_s == pytest.approx(6000 * 131072 / 50e9)
    assert loaded.prompt_ms - full.prompt_ms == pytest.approx(1000 * loaded.tiers.copy_s, rel=0.02)
    assert full.output_tok_s > loaded.output_tok_s > plain.output_tok_s


def test_prediction_declines_tiers_that_are_slower_than_computing() -> None:
    plain = predict(POINT)
    tiers = TierHits(file_tokens=6000)  # 0.8 GB at 0.5 GB/s
    declined = predict(msgspec.structs.replace(POINT, tiers=tiers))
    assert declined.tiers is not None
    assert (declined.tiers.tokens, declined.tiers.declined_tokens) == (0, 6000)
    assert declined.ttft_ms == plain.ttft_ms


def test_waiting_for_files_delays_the_first_token_and_not_the_steps() -> None:
    memory = TierHits(memory_tokens=6000, memory_bytes_s=50e9)
    files = TierHits(file_tokens=6000, memory_bytes_s=50e9, file_bytes_s=10e9)
    one, other = (predict(msgspec.structs.replace(POINT, tiers=hits)) for hits in (memory, files))
    assert other.tiers is not None and other.tiers.wait_s > 0.05
    assert other.tpot_ms == one.tpot_ms
    assert other.prompt_ms - one.prompt_ms == pytest.approx(1000 * other.tiers.wait_s)


@pytest.mark.parametrize(
    "hits", [TierHits(memory_tokens=8192), TierHits(file_tokens=-1), TierHits(memory_bytes_s=0.0)]
)
def test_impossible_tier_hits_are_rejected(hits: TierHits) -> None:
    with pytest.raises(BadInput):
        predict(msgspec.structs.replace(POINT, tiers=hits))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_needs_fewer_devices_where_prompts_are_loaded() -> None:
    space = SearchSpace(
        devices=("h100-sxm",),
        weight_dtypes=("bfloat16",),
        kv_dtypes=("bfloat16",),
        token_budgets=(8192,),
        max_devices_per_replica=1,
        dollars_per_device_hour=3.0,
    )
    spec, slo = load_planning_spec("llama-3.1-8b"), Slo.parse("ttft:4000 tpot:80")
    demand = Demand(rate=12.0, isl=16000, osl=64, isl_p95=16000, longest=16064)

    def num_devices(tiers: TierHits | None) -> int:
        found = search(
            spec, msgspec.structs.replace(demand, tiers=tiers), slo, space, load_catalogue()
        )
        return found.fleets[0].num_devices

    loaded = TierHits(memory_tokens=12800, memory_bytes_s=50e9)
    assert num_devices(loaded) < num_devices(None) == num_devices(TierHits(file_tokens=12800))


def test_plan_says_what_is_loaded_and_what_is_computed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "plan",
        "llama-3.1-8b",
        "--accelerator",
        "h100-sxm",
        "--price-per-hour",
        "3",
        "--max-devices",
        "1",
    ]
    words += ["--quantization", "bfloat16", "--kv-cache-dtype", "bfloat16", "--input-len", "16000"]
    words += ["--kv-tier-memory-share", "0.5", "--kv-tier-memory-bandwidth", "50GB"]
    words += ["--kv-tier-file-share", "0.3", "--slo", "ttft:4000 tpot:80"]
    notes = str(run(capsys, *words)["notes"])
    assert "8,000 tokens are loaded" in notes and "4,800 tokens are in tiers" in notes


def conversations(path: Path) -> Path:
    """Twelve conversations of 4,096 tokens that all return, as a Mooncake trace."""
    rows = [
        {
            "timestamp": 2000 * i,
            "input_length": 4096 + 100,
            "output_length": 8,
            "hash_ids": [8 * (i % 12) + j for j in range(8)],
        }
        for i in range(24)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_simulated_fleet_serves_evicted_prefixes_from_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = f"mooncake:{conversations(tmp_path / 'trace.jsonl')}"
    words = ["simulate", "llama-3.1-8b", "--accelerator", "l4", "--workload", trace]
    words += ["--replay-speed", "1", "--enable-prefix-caching", "--quantization", "bfloat16"]
    plain = run(capsys, *words)
    tiers = ["--kv-tier-memory", "16GiB", "--kv-tier-memory-bandwidth", "20GB"]
    loaded = run(capsys, *words, *tiers)
    assert plain["tier_share"] == {} and loaded["tier_share"]["memory"] > 0.2  # type: ignore[index]
    assert loaded["hit_share"] > plain["hit_share"] + 0.2  # type: ignore[operator]
    assert loaded["ttft"]["mean"] < plain["ttft"]["mean"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("simulate llama-3.1-8b --accelerator l4 --kv-tier-memory 1GB", "--enable-prefix-caching"),
        (
            "simulate llama-3.1-8b --accelerator l4 --kv-tier-file-bandwidth 1GB",
            "--kv-tier-memory or --kv-tier-size",
        ),
        (
            "predict llama-3.1-8b --accelerator l4 --kv-tier-memory-bandwidth 1GB",
            "--kv-tier-memory-tokens",
        ),
        (
            "plan llama-3.1-8b --cached-share 0.6 --kv-tier-memory-share 0.6",
            "exceed all tokens",
        ),
    ],
)
def test_tier_options_without_effect_are_refused(
    capsys: pytest.CaptureFixture[str], words: str, reason: str
) -> None:
    assert main(words.split()) == 2
    assert reason in capsys.readouterr().err


def test_demand_without_tiers_is_unchanged() -> None:
    assert Demand(rate=1, isl=10, osl=1, isl_p95=10, longest=11).tiers is None
