"""What pinned prefixes take of a replica's cache, against the engine's scheduler and its pool."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from ridgeline.cli.main import main
from ridgeline.config import shared
from ridgeline.config.settings import Settings
from ridgeline.engine.scheduler.admission.limits import SchedulerLimits
from ridgeline.engine.scheduler.batching import make_policy
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.prefix_cache import PrefixCache
from ridgeline.engine.scheduler.kv.prefix_pins import MAX_ACCOUNT_SHARE, PrefixPins
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.hardware.catalogue import load_catalogue
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost.kv_layout import ONE_GROUP, KvLayout
from ridgeline.modelspec.cost.step import CostModel
from ridgeline.plan.fleet.cache_needs import MAX_PINNED, PIN_SHARE, CacheNeeds, cache_needs
from ridgeline.plan.fleet.demand import PinnedPrefixes, demand_of
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.replica import build_replica
from ridgeline.records import CachePolicy, Request, Sampling
from tests.engine.scheduler.helpers import step

SIZE, PREFIX, REST = 4, 40, 13
ONE_DEVICE = Layout()
LAYOUTS = {
    "one group": ONE_GROUP,
    "short windows": KvLayout((0,), ((1,), (2,)), window=8, tile_tokens=4),
    "windows that reach the prefix": KvLayout((0,), ((1,), (2,), (3,)), window=32, tile_tokens=8),
    "windows longer than the text": KvLayout((0,), ((1,),), window=400, tile_tokens=4),
    "windows only": KvLayout((), ((0,), (1,)), window=24, tile_tokens=4),
    "chunks": KvLayout((0,), ((1,),), chunk=32, tile_tokens=4),
}


def make_scheduler(layout: KvLayout) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256, kv_layout=layout
    )
    pool = BlockPool(512, SIZE)
    cache = PrefixCache(pool, layout=layout)
    cache.pins = PrefixPins(256)
    return Scheduler(limits, make_policy("continuous"), pool, cache)


def ask(scheduler: Scheduler, number: int, num_rest: int, max_tokens: int) -> None:
    """Add a prompt of the prefix and tokens that no other has; it pins the prefix."""
    rest = range(1000 * number, 1000 * number + num_rest)
    scheduler.add(
        Request(
            id=str(number),
            prompt=(*range(1, PREFIX + 1), *rest),
            sampling=Sampling(max_tokens=max_tokens, ignore_eos=True, seed=0),
            arrival_s=0.0,
            cache=CachePolicy(pin_tokens=PREFIX),
        )
    )


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_blocks_of_requests_behind_a_pinned_prefix(layout: KvLayout) -> None:
    scheduler = make_scheduler(layout)
    ask(scheduler, 1, 1, 1)
    while scheduler.has_work:
        step(scheduler, 0.0)
    assert len(scheduler.pool._pinned) == PREFIX // SIZE * layout.num_groups
    for number in (2, 3, 4):
        ask(scheduler, number, REST, 40)
    step(scheduler, 0.0)  # the prompts
    for num_tokens in range(PREFIX + REST + 1, PREFIX + REST + 30):
        step(scheduler, 0.0)
        held = layout.decode_blocks(num_tokens, SIZE)
        shared = layout.shared_blocks(num_tokens, PREFIX, SIZE)
        assert scheduler.pool.num_owned == shared + 3 * (held - shared), num_tokens


def needs(
    model: str, layout: Layout = ONE_DEVICE, *, count: int = 1, tokens: int = 4096
) -> tuple[CostModel, CacheNeeds]:
    machine = build_replica(load_planning_spec(model), load_catalogue()["h100-sxm"], layout)
    pinned = PinnedPrefixes(tokens=tokens, count=count)
    demand = msgspec.structs.replace(demand_of([(8192, 128)], 1.0), pinned=pinned)
    return machine.cost, cache_needs(machine, demand)


def test_windows_keep_their_part_behind_a_pinned_prefix() -> None:
    """Of Gemma 3's groups of layers, only the one without a window has the prefix in common."""
    cost, found = needs("gemma-3-27b", count=3)
    assert cost.layout.num_groups > 1
    assert found.pinned == 3 * 4096
    whole = cost.kv_tokens(8192 + 128)
    assert found.per_request == found.longest
    assert found.per_request == pytest.approx(whole - 4096 / cost.layout.num_groups)
    _, plain = needs("llama-3.1-8b", count=3)
    assert (plain.pinned, plain.per_request) == (3 * 4096, 4096 + 128)
    _, unpinned = needs("llama-3.1-8b", tokens=0)
    assert (unpinned.pinned, unpinned.per_request) == (0, 8192 + 128)


def test_every_attention_group_pins_its_own() -> None:
    _, found = needs("deepseek-v3", Layout(tp=1, dp=16, ep=16))
    assert found.pinned == 16 * 4096


def test_one_account_pins_what_the_engine_lets_it() -> None:
    assert Settings().prefix_pin_share == PIN_SHARE
    assert MAX_PINNED == PIN_SHARE * MAX_ACCOUNT_SHARE == 0.25
    _, found = needs("llama-3.1-8b")
    assert found.room(4 * 4096) == 3 * 4096
    assert found.room(4 * 4096 - 1) == 0


@pytest.mark.parametrize(
    "command", ["plan", "simulate --enable-prefix-caching --tensor-parallel-size 4"]
)
def test_recurrent_layers_have_no_prefixes_to_pin(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *flags = command.split()
    asked = [name, "qwen3-next-80b-a3b", "--accelerator", "h100-sxm", *flags]
    assert main([*asked, "--pinned-len", "512"]) == 2
    assert "--pinned-len needs a prefix cache" in " ".join(capsys.readouterr().err.split())


def test_both_options_of_pinned_prefixes_are_of_one_version() -> None:
    assert shared.PINNED_PREFIXES.since == shared.PINNED_LEN.since == "0.3"


def test_recurrent_layers_find_no_prefixes_of_a_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"timestamp": 0, "input_length": 1500, "output_length": 4, "hash_ids": [1, 2]}
    recorded = tmp_path / "trace.jsonl"
    recorded.write_text("\n".join(json.dumps(row | {"timestamp": 9000 * i}) for i in range(4)))
    flags = ["--accelerator", "h100-sxm", "--workload", f"mooncake:{recorded}", "--json"]
    flags += ["--enable-prefix-caching", "--replay-speed", "1", "--tensor-parallel-size", "4"]
    shares = {}
    for model in ("llama-3.1-8b", "qwen3-next-80b-a3b"):
        assert main(["simulate", model, *flags]) == 0
        shares[model] = json.loads(capsys.readouterr().out)["hit_share"]
    assert shares["llama-3.1-8b"] > 0.5
    assert not shares["qwen3-next-80b-a3b"]
