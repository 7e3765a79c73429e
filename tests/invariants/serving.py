"""Serves requests with a real model under any schedule, step by step in this thread.

`serve_alone` is the reference: one request, one choice, the whole prompt in one step, nothing
shared. `check` compares any other schedule with it, token for token. Where they differ, rounding
must explain the difference: the other token must be within `Model.slack` of being chosen from the
logits that `serve_alone` sampled. Such flips are printed. `Model.logits`, computed without a cache,
cannot be used for that: 8-bit keys and values move logits by 0.02, so what is a tie in the served
logits is none there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from unittest import mock

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.kv_format import kv_format
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.batch import make_batch
from ridgeline.engine.execution.layers import choose as choose_forward
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.kv_tiers.block_slab import BlockSlab, bytes_per_block
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.sampling.reference import distribution
from ridgeline.engine.sampling.uniform import uniform
from ridgeline.engine.sampling.verify.verifier import DraftDistributions, RowObserver, Verifier
from ridgeline.engine.scheduler import (
    BlockPool,
    NoPrefixCache,
    PrefixCache,
    Scheduler,
    SchedulerLimits,
    make_policy,
)
from ridgeline.engine.scheduler.kv.cache_tiers import CacheTiers, NoStorage
from ridgeline.engine.scheduler.kv.memory_tier import MemoryTier
from ridgeline.engine.scheduler.kv.tiers import Transfers
from ridgeline.engine.scheduler.plan import Run, SamplePoint
from ridgeline.engine.scheduler.speculation.base import DraftContext, DraftProposer, NoDrafts
from ridgeline.engine.scheduler.stopping import derive_seed
from ridgeline.engine.speculate.depth_control.fixed_depth import FixedDepth
from ridgeline.engine.speculate.drafters.base import Lookup
from ridgeline.engine.speculate.drafters.combined import Combined, Lookups
from ridgeline.engine.speculate.drafters.eagle import EagleDrafter, EagleLayer, EagleShape
from ridgeline.engine.speculate.drafters.hidden_states import HiddenStates
from ridgeline.engine.speculate.drafters.layer_skip import SelfDrafter
from ridgeline.engine.speculate.drafters.lookahead import LookaheadDrafter
from ridgeline.engine.speculate.drafters.medusa import MedusaDrafter, MedusaHeads
from ridgeline.engine.speculate.drafters.ngram import NgramDrafter
from ridgeline.engine.speculate.drafters.suffix import SuffixDrafter
from ridgeline.engine.speculate.drafters.target_model import TargetModel
from ridgeline.engine.speculate.token_tree import FixedTree, TokenTree, parse_tree
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import has_states
from ridgeline.modelspec.cost.kv_layout import ONE_GROUP, KvLayout, kv_layout
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import apply_quantization, with_dtype, with_kv_dtype
from ridgeline.records import Event, Failed, Request, Token

TREE = parse_tree("[(0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0), (2,)]")
SLACK = 1e-4
ROUNDING = 1e-5  # in a logit; 3e-6 was seen
# Where activations are rounded to 8-bit codes, a difference in the last bit occasionally yields the
# neighbouring code: up to 6e-4 in a logit on the demo model. The two forms of a delta net differ by
# as much. With INT8's single scale per row it is 0.1 to 0.25, so nothing that rounds differently is
# compared there (test_metamorphic.py).
CODE_SLACK = 2e-3
CONTEXT = 96
LOOKUPS: dict[str, Callable[[], Lookup]] = {
    "ngram": lambda: NgramDrafter(1, 3),
    "suffix": lambda: Lookups([NgramDrafter(2, 4), SuffixDrafter()]),
    "lookahead": LookaheadDrafter,
}
Answers = dict[tuple[str, int], list[int]]


@dataclass(frozen=True)
class Model:
    """Weights in float32, loaded once and shared by every schedule."""

    spec: ModelSpec = field(repr=False)  # hypothesis prints arguments
    decoder: Decoder = field(repr=False)
    attention: str
    gives_back: bool = True  # whether layers with a window give blocks back
    references: dict[bytes, list[int]] = field(default_factory=dict, repr=False)

    @staticmethod
    def load(
        name: str,
        attention: str = "torch",
        quantization: str | None = None,
        kv_dtype: str = "float32",
    ) -> Model:
        spec = with_dtype(load_spec(name), "float32")
        spec = apply_quantization(spec, quantization) if quantization else spec
        spec = with_kv_dtype(spec, kv_dtype)
        decoder = load_decoder(name, spec, device="cpu", compute_dtype=torch.float32)
        return Model(spec, decoder, attention)

    def target(self, kv: KvCache) -> TargetModel:
        layer_backend, _ = choose_forward("auto", self.spec, torch.device("cpu"), torch.float32)
        return TargetModel(self.decoder, kv, self.attention, layer_backend)

    @property
    def layout(self) -> KvLayout:
        """Layers with a window give single blocks back, so that short texts show it.

        The native kernels read whole tiles, which would be too long.
        """
        if not self.gives_back:
            return ONE_GROUP
        layout = kv_layout(self.spec)
        return layout if self.attention == "native" else replace(layout, tile_tokens=1)

    @property
    def slack(self) -> float:
        """The distance from being chosen that rounding explains, in logits or in probability."""
        layer = self.spec.layers[0]
        codes = layer.mlp.gate.format.kind in ("int8", "int4") or has_states(self.spec)
        # Ranges of torch's keys are rounded; the kernel's keys have the same bits in any batch.
        codes = codes or (self.spec.kv_dtype == "int4" and self.attention != "native")
        return CODE_SLACK if codes else SLACK

    def served_logits(self, tokens: Sequence[int]) -> np.ndarray:
        """float64 logits [V] after `tokens`, in one step, through a KV cache of the model's format.

        These are what `serve_alone` samples, up to rounding. With an INT4 cache they are computed
        without one: every query sees each key in the form that it would have in the cache.
        """
        if self.spec.kv_dtype == "int4":
            return self.logits(tokens)
        num_blocks = -(-len(tokens) // 16)
        format, dtype = kv_format(self.spec.kv_dtype), torch.float32
        kv = KvCache.allocate(self.spec, num_blocks, 16, dtype, "cpu", format)
        run = Run(0, 0, tuple(tokens), tuple(range(num_blocks)), None)
        batch = make_batch([run], torch.device("cpu"))
        attend = build_attention(self.attention, self.spec, kv).prepare([run])
        with torch.inference_mode():
            x_TC = self.decoder.hidden(batch.tokens_T, batch.positions_T, batch.end, attend)
            logits_V = self.decoder.logits(x_TC[-1:])[0]
        return logits_V.float().numpy().astype(np.float64)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """float64 logits [V] after `tokens`, without cache, batch or chunks."""
        runner = TorchRunner(self.decoder, None, None)
        return runner.logits(tokens)[-1].float().numpy().astype(np.float64)


@dataclass(frozen=True)
class Schedule:
    """How requests are served. Request i arrives before step `arrives[i]` (missing: the first)."""

    num_blocks: int = 200
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    chunked: bool = True
    policy: str = "continuous"
    prefix: bool = False
    arrives: tuple[int, ...] = ()
    rounds: int = 1
    drafts: str = ""
    depth: int = 3
    trees: bool = False
    max_model_len: int = CONTEXT
    tier_slots: int = 0  # of a memory tier below the prefix cache


@dataclass
class Served:
    """The answers and what the scheduler did."""

    answers: Answers = field(default_factory=dict)
    num_preempted: int = 0
    hit_tokens: int = 0
    num_forked: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    num_short: int = 0  # steps with drafts that took the greedy fast path
    num_branched: int = 0  # runs of which a branch was accepted
    num_tier_loads: int = 0  # blocks


def serve(model: Model, requests: Sequence[Request], schedule: Schedule) -> list[Served]:
    """Serve all requests in one engine, `rounds` times over; the clock ticks once per step."""
    scheduler, runner = _build(model, schedule, requests)
    return [
        _round(scheduler, runner, [_named(request, turn) for request in requests], schedule)
        for turn in range(schedule.rounds)
    ]


def _named(request: Request, turn: int) -> Request:
    return msgspec.structs.replace(request, id=f"{request.id}/{turn}") if turn else request


class _Oracle:
    """Drafts the reference answer with about a third of its tokens replaced."""

    name = "oracle"

    def __init__(self, answers: list[tuple[int, ...]], vocab_size: int) -> None:
        self._answers, self._vocab_size, self._rng = answers, vocab_size, random.Random(5)

    def draft(
        self, contexts: Sequence[DraftContext], depths: Sequence[int]
    ) -> list[tuple[int, ...]]:
        return [
            self._draft(tuple(context.tokens), depth)
            for context, depth in zip(contexts, depths, strict=True)
        ]

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        pass

    def _draft(self, tokens: tuple[int, ...], depth: int) -> tuple[int, ...]:
        known = [a for a in self._answers if a[: len(tokens)] == tokens]
        future = self._rng.choice(known)[len(tokens) :][:depth] if known else (1,) * depth
        wrong = self._rng.randrange(self._vocab_size)
        return tuple(t if self._rng.random() < 0.7 else wrong for t in future)


class _TreeOracle(_Oracle):
    """Drafts several such chains."""

    def trees(
        self, contexts: Sequence[DraftContext], tree: TokenTree
    ) -> list[list[tuple[int, ...]]]:
        return [
            [
                self._draft(tuple(context.tokens), min(context.max_drafts, len(leaf)))
                for leaf in tree.leaves
            ]
            for context in contexts
        ]


def drafts_of(
    model: Model, requests: Sequence[Request], schedule: Schedule, kv: KvCache, states: HiddenStates
) -> DraftProposer:
    if not schedule.drafts:
        return NoDrafts()
    if schedule.drafts in LOOKUPS:
        return FixedDepth(Combined(LOOKUPS[schedule.drafts](), None), schedule.depth)
    if schedule.drafts == "self":
        kept = [i for i in range(len(model.spec.layers)) if i != 1]
        drafter = SelfDrafter(model.target(kv), kept, drawn=DraftDistributions(), draws=False)
        return FixedDepth(drafter, schedule.depth)
    if schedule.drafts == "medusa":
        size = model.spec.hidden_size
        heads = MedusaHeads(torch.zeros(3, size, size), torch.zeros(3, size))
        medusa = MedusaDrafter(
            heads, model.decoder, states, drawn=DraftDistributions(), draws=False
        )
        return FixedTree(medusa, TREE) if schedule.trees else FixedDepth(medusa, schedule.depth)
    if schedule.drafts == "eagle":
        return FixedDepth(_eagle(model, schedule, states), schedule.depth)
    choices = [(request, index) for request in requests for index in range(request.sampling.n)]
    answers = [(*request.prompt, *serve_alone(model, request, index)) for request, index in choices]
    if schedule.trees:
        return FixedTree(_TreeOracle(answers, model.spec.vocab_size), TREE)
    return FixedDepth(_Oracle(answers, model.spec.vocab_size), schedule.depth)


def _eagle(model: Model, schedule: Schedule, states: HiddenStates) -> EagleDrafter:
    """A layer of random weights that roughly passes the state on."""
    size, random = model.spec.hidden_size, torch.Generator().manual_seed(6)
    shape = EagleShape(
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=32,
        rope_theta=1e4,
        norm_eps=1e-5,
    )
    tensors = {
        name: torch.randn(dims, generator=random) * 0.05
        for name, dims in shape.shapes(size).items()
    }
    tensors["fc.weight"][:, size:] += torch.eye(size)
    tensors["norm.weight"] += 1.0
    layer = EagleLayer(shape, tensors, model.decoder, CONTEXT)
    blocks = schedule.num_blocks, schedule.block_size
    kv = KvCache.allocate(layer.spec, *blocks, torch.float32, "cpu")
    attention = build_attention(model.attention, layer.spec, kv)
    pool = BlockPool(*blocks)
    return EagleDrafter(layer, attention, pool, states, drawn=DraftDistributions(), draws=False)


def _build(
    model: Model, schedule: Schedule, requests: Sequence[Request]
) -> tuple[Scheduler, TorchRunner]:
    layout, size = model.layout, schedule.block_size
    run_tokens = schedule.max_num_batched_tokens if schedule.chunked else schedule.max_model_len
    num_blocks = layout.max_blocks(schedule.num_blocks * size, size, run_tokens)
    pool = BlockPool(num_blocks, size)
    limits = SchedulerLimits(
        max_num_seqs=schedule.max_num_seqs,
        max_num_batched_tokens=schedule.max_num_batched_tokens,
        max_model_len=schedule.max_model_len,
        chunked_prefill=schedule.chunked,
        shares_prefixes=not has_states(model.spec),
        kv_layout=layout,
    )
    cached = schedule.prefix and limits.shares_prefixes
    cache = PrefixCache(pool, layout=layout) if cached else NoPrefixCache()
    policy = make_policy(schedule.policy, wait_s=2.0)
    kv = KvCache.allocate(
        model.spec,
        num_blocks,
        schedule.block_size,
        torch.float32,
        "cpu",
        kv_format(model.spec.kv_dtype),
        num_states=schedule.max_num_seqs,
        layout=layout,
    )
    if schedule.tier_slots and isinstance(cache, PrefixCache):
        cache.tiers = _SlabTiers(pool, cache, kv, schedule.tier_slots)
    states = HiddenStates(window=64)
    attention = build_attention(model.attention, model.spec, kv)
    eos, drafts = model.spec.eos_token_ids, drafts_of(model, requests, schedule, kv, states)
    verifier = Verifier(row_observer=_row_observer(drafts))
    runner = TorchRunner(model.decoder, kv, attention, verifier=verifier, observer=states)
    scheduler = Scheduler(limits, policy, pool, cache, eos_token_ids=eos, drafts=drafts)
    return scheduler, runner


class _SlabTiers(CacheTiers):
    """A memory tier that keeps every block, and moves the bytes itself."""

    def __init__(self, pool: BlockPool, cache: PrefixCache, kv: KvCache, num_slots: int) -> None:
        size, memory = bytes_per_block(kv), MemoryTier(num_slots)
        super().__init__(
            pool, cache, memory, NoStorage(), layout=kv.layout, block_bytes=size, min_tokens=1
        )
        self.slab = BlockSlab(kv, num_slots, self.memory_rate)

    def take_transfers(self) -> Transfers:
        stores, loads = super().take_transfers()
        self.slab.transfer(stores, loads)
        return stores, loads


def _row_observer(drafts: DraftProposer) -> RowObserver | None:
    """The lookahead drafter's observer of the model's choices at drafted rows, if it is used."""
    lookup = getattr(getattr(drafts, "_drafter", None), "_lookup", None)
    return lookup.watch if isinstance(lookup, LookaheadDrafter) else None


def _round(
    scheduler: Scheduler, runner: TorchRunner, requests: Sequence[Request], schedule: Schedule
) -> Served:
    before = msgspec.structs.replace(scheduler.totals)
    hits = scheduler.cache.hit_tokens
    drafted = msgspec.structs.replace(scheduler.draft_scheduler.totals)
    waiting = dict(enumerate(requests))
    served = Served({(a.id.split("/")[0], i): [] for a in requests for i in range(a.sampling.n)})
    step = 0
    while waiting or scheduler.has_work:
        due = [
            i for i in waiting if (schedule.arrives[i] if i < len(schedule.arrives) else 0) <= step
        ]
        for i in due:
            scheduler.add(msgspec.structs.replace(waiting.pop(i), arrival_s=float(step)))
        plan = scheduler.plan(float(step))
        has_drafts = any(run.num_drafts for run in plan.runs)
        served.num_tier_loads += len(plan.loads)
        served.num_short += has_drafts and not plan.copies and runner.greedy.can_run(plan.runs)
        result = runner.run(plan)
        served.num_branched += sum(output.path > 0 for output in result.outputs)
        _record(scheduler.commit(plan, result, step + 0.5), served)
        step += 1
        assert step < 5000, "the schedule does not end"
    served.num_preempted = scheduler.totals.num_preempted - before.num_preempted
    served.num_forked = scheduler.totals.num_forked - before.num_forked
    served.hit_tokens = scheduler.cache.hit_tokens - hits
    totals = scheduler.draft_scheduler.totals
    served.num_accepted = totals.num_accepted - drafted.num_accepted
    served.num_rejected = totals.num_tokens - drafted.num_tokens - served.num_accepted
    return served


def _record(events: Sequence[Event], served: Served) -> None:
    for event in events:
        assert not isinstance(event, Failed), event
        if isinstance(event, Token):
            served.answers[event.request_id.split("/")[0], event.index].append(event.token)


def serve_alone(model: Model, request: Request, index: int = 0) -> list[int]:
    """The answer of choice `index`, computed on its own with the seed derived for it."""
    key = msgspec.json.encode((request.prompt, request.sampling, index))
    if key not in model.references:
        model.references[key] = _serve_alone(model, request, index)
    return model.references[key]


def _serve_alone(model: Model, request: Request, index: int) -> list[int]:
    single = msgspec.structs.replace(request.sampling, n=1)
    with mock.patch(
        "ridgeline.engine.scheduler.queue.sequence_registry.derive_seed",
        lambda base, _: derive_seed(base, index),
    ):
        schedule = Schedule(block_size=32 if model.layout.recent else Schedule.block_size)
        [served] = serve(model, [msgspec.structs.replace(request, sampling=single)], schedule)
    return served.answers[request.id, 0]


def check(model: Model, requests: Sequence[Request], served: Served) -> None:
    """Every answer equals the reference, up to flips that rounding explains."""
    for request in requests:
        for index in range(request.sampling.n):
            _compare(model, request, index, served.answers[request.id, index])


def _compare(model: Model, request: Request, index: int, tokens: list[int]) -> None:
    expected = serve_alone(model, request, index)
    if tokens == expected:
        return
    pairs = enumerate(zip(expected, tokens, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), None)
    assert place is not None, f"{request.id}[{index}]: {len(tokens)} tokens, not {len(expected)}"
    logits_V = model.served_logits((*request.prompt, *expected[:place]))
    distance = distance_of(logits_V, request, index, expected[:place], tokens[place])
    flip = f"{tokens[place]} for {expected[place]}, {distance:.1e} off"
    message = f"{request.id}[{index}] at {place}: {flip}"
    assert distance < model.slack, message
    print(f"flip that rounding explains: {message}")


def distance_of(
    logits_V: np.ndarray, request: Request, index: int, output: list[int], token: int
) -> float:
    """How far logits_V are from yielding `token`: in logits if greedy, else in probability."""
    point = SamplePoint(
        sampling=request.sampling,
        seed=derive_seed(request.sampling.seed or 0, index),
        index=len(output),
        num_prompt=len(request.prompt),
        history=(*request.prompt, *output) if request.sampling.has_penalties else (),
    )
    if request.sampling.greedy:
        probs_V = distribution(logits_V, point)
        return float(logits_V[probs_V.argmax()] - logits_V[token])
    number = uniform(point.seed, point.index)
    return min(_missed_by(logits_V, point, token, number, by) for by in (0.0, ROUNDING, -ROUNDING))


def _missed_by(
    logits_V: np.ndarray, point: SamplePoint, token: int, number: float, by: float
) -> float:
    """How far `number` is from the token's part of the distribution, its logit moved by `by`.

    Of two tokens that are equal but for rounding, either may be the last one within top_p.
    """
    moved_V = logits_V.copy()
    moved_V[token] += by
    probs_V = distribution(moved_V, point)
    upper = probs_V.cumsum()[token]
    return float(max(upper - probs_V[token] - number, number - upper, 0.0))
