"""Ranks that divide the KV cache by positions compute every bit of one process."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.kv_format import kv_format
from ridgeline.engine.attention.native import NativeAttention
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.parallel.layers.context import ContextAttention
from ridgeline.engine.parallel.messages import RankConfig
from ridgeline.engine.scheduler import (
    BlockPool,
    PrefixCache,
    Scheduler,
    SchedulerLimits,
    make_policy,
)
from ridgeline.engine.scheduler.kv.block_tables import UnusedTables
from ridgeline.engine.scheduler.plan import Run, SamplePoint, StepPlan
from ridgeline.errors import CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost.kv_layout import kv_layout
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import with_dtype, with_kv_dtype
from ridgeline.modelspec.shard import CHUNK_TOKENS, ParallelSizes, Shard, check_sizes
from ridgeline.records import Failed, Request, Sampling, Token
from tests.conformance.tiny_models import VOCAB
from tests.engine.parallel.emulated import (
    Board,
    Checkpoint,
    EmulatedRanks,
    ThreadCollectives,
    config_of,
    one_process,
)

pytestmark = pytest.mark.slow

SAMPLED = SamplePoint(Sampling(temperature=1.0, logprobs=2, top_k=20), 7, 0, 0)
LONGEST = 4 * CHUNK_TOKENS
CP2, CP3 = ParallelSizes(context=2), ParallelSizes(context=3)


def with_changes(spec: ModelSpec, window: int | None, softcap: float | None) -> ModelSpec:
    """The model for long texts, every other layer with a window, every third with a soft cap."""
    layers = []
    for i, layer in enumerate(spec.layers):
        attention = msgspec.structs.replace(
            layer.attention,
            window=window if i % 2 else None,
            softcap=softcap if i % 3 == 2 else None,
        )
        layers.append(msgspec.structs.replace(layer, attention=attention))
    return msgspec.structs.replace(spec, layers=tuple(layers), max_positions=LONGEST)


def in_threads(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of jobs that run side by side."""
    results: list[Any] = [None] * len(jobs)

    def work(i: int) -> None:
        results[i] = jobs[i]()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_chunks_on_several_ranks_merge_to_the_bits_of_one_kernel(
    kv_dtype: str, num_ranks: int, checkpoint: Checkpoint
) -> None:
    spec = with_dtype(load_spec(str(checkpoint("gpt-oss"))), "float32")
    spec = with_kv_dtype(with_changes(spec, 700, 20.0), kv_dtype)
    rng, numbers = random.Random(num_ranks), torch.Generator().manual_seed(num_ranks)
    format = kv_format(kv_dtype)
    blocks_of_one = list(range(2 * LONGEST // 16))
    rng.shuffle(blocks_of_one)
    num_blocks = 2 * -(-LONGEST // (CHUNK_TOKENS * num_ranks))
    blocks_of_ranks = list(range(num_blocks))
    rng.shuffle(blocks_of_ranks)
    one = NativeAttention(
        spec, KvCache.allocate(spec, len(blocks_of_one), 16, torch.float32, "cpu", format)
    )
    sizes = ParallelSizes(context=num_ranks)
    board = Board(sizes)
    ranks = [
        ContextAttention(
            spec,
            KvCache.allocate(spec, num_blocks, CHUNK_TOKENS, torch.float32, "cpu", format),
            collectives=ThreadCollectives(Shard(sizes=sizes, rank=rank), board),
            divides_rows=False,
        )
        for rank in range(num_ranks)
    ]
    lengths = [0, 0]
    for counts in ([1300, 1], [1, 530], [2, 1], [600, 700]):
        runs = [(seq, lengths[seq], (0,) * count) for seq, count in enumerate(counts)]
        step = one.prepare([_run(*own, blocks_of_one) for own in runs])
        steps = [rank.prepare([_run(*own, blocks_of_ranks) for own in runs]) for rank in ranks]
        for layer, own in enumerate(spec.layers):
            a = own.attention
            q_THD = torch.randn((sum(counts), a.num_heads, a.head_dim), generator=numbers)
            kv_T2KD = torch.randn((sum(counts), 2, a.num_kv_heads, a.head_dim), generator=numbers)
            sinks_H = torch.randn(a.num_heads, generator=numbers)
            expected = step(q_THD, kv_T2KD, layer, sinks_H)
            jobs = [partial(own_step, q_THD, kv_T2KD, layer, sinks_H) for own_step in steps]
            for result in in_threads(jobs):
                assert torch.equal(result, expected), (counts, layer)
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]


def _run(seq: int, start: int, tokens: tuple[int, ...], blocks: list[int]) -> Run:
    half = len(blocks) // 2
    return Run(seq, start, tokens, tuple(blocks[seq * half : (seq + 1) * half]), None)


def serve(
    runner: TorchRunner, spec: ModelSpec, num_blocks: int, block_size: int, requests: list[Request]
) -> tuple[dict[str, list[Any]], int, int]:
    """Serve requests, each of which arrives at a step.

    Returns their tokens and log-probabilities, preemptions and tokens of prefix hits.
    """
    pool = BlockPool(num_blocks, block_size)
    layout = kv_layout(spec)
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=512, max_model_len=LONGEST, kv_layout=layout
    )
    cache = PrefixCache(pool, None, layout)
    scheduler = Scheduler(limits, make_policy("continuous"), pool, cache, eos_token_ids=())
    answers: dict[str, list[Any]] = {request.id: [] for request in requests}
    now_s, coming, num_preempted, num_hits = 0.0, list(requests), 0, 0
    while coming or scheduler.has_work:
        while coming and coming[0].arrival_s <= now_s:
            scheduler.add(coming.pop(0))
        plan = scheduler.plan(now_s)
        num_preempted += scheduler.stats().num_preempted
        num_hits += scheduler.stats().hit_tokens
        for event in scheduler.commit(plan, runner.run(plan), now_s):
            assert not isinstance(event, Failed), event
            if isinstance(event, Token):
                answers[event.request_id].append((event.token, event.logprobs))
        now_s += 1.0
    return answers, num_preempted, num_hits


def random_requests(seed: int, block_size: int) -> list[Request]:
    """Every other one begins with the same block and more; the rest grow beyond one block."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(block_size + rng.randrange(20, 90))]
    requests = []
    for i in range(7):
        own = [rng.randrange(VOCAB) for _ in range(rng.randrange(2, 300))]
        prompt = (own * block_size)[: block_size - 3] if i % 2 else shared + own
        length = rng.randrange(6, 10)
        sampling = Sampling(temperature=0.9, top_k=30, seed=i, max_tokens=length, logprobs=1)
        request = Request(
            id=str(i),
            prompt=tuple(prompt),
            sampling=sampling,
            arrival_s=2.0 * i,
            background=i % 3 == 0,  # gives way to the others
        )
        requests.append(request)
    return requests


def long_config(
    folder: Path, sizes: ParallelSizes, quantization: str | None = None, **changes: Any
) -> RankConfig:
    config = config_of(folder, sizes, quantization)
    spec = msgspec.structs.replace(config.spec, max_positions=LONGEST)
    return msgspec.structs.replace(
        config,
        spec=spec,
        max_model_len=LONGEST,
        block_size=CHUNK_TOKENS * sizes.context,
        **changes,
    )


@pytest.mark.parametrize(
    ("name", "sizes", "layers"),
    [
        ("llama", CP2, "native"),
        ("llama", ParallelSizes(context=2, pipeline=2), "native"),
        ("gemma3", CP3, "native"),  # windows of 9 tokens, whose blocks are given back
        ("mixtral", CP2, "torch"),
        ("mixtral", ParallelSizes(context=2, expert=2), "torch"),
    ],
)
def test_requests_served_over_ranks_have_the_bits_of_one_process(
    name: str, sizes: ParallelSizes, layers: str, checkpoint: Checkpoint
) -> None:
    config = long_config(checkpoint(name), sizes)
    assert config.layer_backend == layers
    requests = random_requests(sizes.num_ranks, config.block_size)
    layout = kv_layout(config.spec)
    num_blocks = 4 * layout.num_groups
    config = msgspec.structs.replace(config, num_blocks=num_blocks)
    # Native layers compute a row alike in any schedule, so one process may have another one.
    size = 16 if layers == "native" else config.block_size
    num_equal = num_blocks * config.block_size // size
    reference = msgspec.structs.replace(
        config, sizes=ParallelSizes(), block_size=size, num_blocks=num_equal
    )
    expected, _, _ = serve(one_process(reference), config.spec, num_equal, size, requests)
    with EmulatedRanks(config) as ranks:
        answers, num_preempted, num_hits = serve(
            ranks.runner, config.spec, num_blocks, config.block_size, requests
        )
    assert answers == expected
    assert num_preempted and num_hits


@pytest.mark.parametrize(
    ("name", "sizes", "quantization"),
    [
        ("llama", ParallelSizes(context=2, tensor=2), None),
        ("llama", ParallelSizes(context=2, tensor=2, sequence=True), None),
        ("llama", ParallelSizes(context=2, tensor=2, pipeline=2), None),
        ("llama", ParallelSizes(context=2, tensor=2), "int8"),
        ("mixtral", ParallelSizes(context=2, tensor=2), None),
        ("mixtral", ParallelSizes(context=2, tensor=2, expert=4), None),
        ("mixtral", ParallelSizes(context=2, tensor=2, expert=4, sequence=True), None),
    ],
)
def test_divided_cache_of_split_heads_has_the_bits_of_split_heads(
    name: str, sizes: ParallelSizes, quantization: str | None, checkpoint: Checkpoint
) -> None:
    config = long_config(checkpoint(name), sizes, quantization, num_blocks=4)
    split = ParallelSizes(tensor=2, expert=2 if sizes.expert > 1 else 1)
    rng = random.Random(len(name))
    text = [rng.randrange(VOCAB) for _ in range(CHUNK_TOKENS + 90)]
    found = []
    for own in (config, msgspec.structs.replace(config, sizes=split)):
        with EmulatedRanks(own) as ranks:
            blocks = UnusedTables(ranks.runner.cache.layout, 1).of(0)
            runs = [
                Run(0, 0, tuple(text[:-1]), sample=None, **blocks),
                Run(0, len(text) - 1, tuple(text[-1:]), sample=SAMPLED, **blocks),
            ]
            outputs = [ranks.runner.run(StepPlan(i, (run,))).outputs for i, run in enumerate(runs)]
            found.append((outputs[-1], ranks.runner.logits(text)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_each_rank_holds_its_share_of_the_cache(checkpoint: Checkpoint) -> None:
    config = long_config(checkpoint("llama"), CP2, num_blocks=4)
    with EmulatedRanks(config) as ranks:
        held = [model.cache.nbytes for model in ranks.models]
        text: list[int] = [3, 1, 4, 1, 5] * 300
        logits_TV: Tensor = ranks.runner.logits(text)
    one = one_process(msgspec.structs.replace(config, sizes=ParallelSizes(), block_size=1024))
    assert held == [one.cache.nbytes // 2] * 2
    assert torch.equal(logits_TV, one.logits(text))


@pytest.mark.parametrize(
    ("name", "sizes", "word"),
    [
        ("mixtral", ParallelSizes(context=2, tensor=2, expert=2), "the 4 ranks"),
        ("llama", CP2, "one chunk"),
        ("qwen3.5", CP2, "no positions to divide"),
        ("deepseek-v2", CP2, "no native kernel"),
    ],
)
def test_model_whose_positions_cannot_be_divided_is_refused(
    name: str, sizes: ParallelSizes, word: str, checkpoint: Checkpoint
) -> None:
    spec = load_spec(str(checkpoint(name)))
    with pytest.raises(CannotRun, match=word):
        check_sizes(spec, sizes)
