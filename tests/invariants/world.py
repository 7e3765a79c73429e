"""Drives a scheduler and detects every wrong token, wrong event and wrong KV access.

`World` runs a Scheduler with a scripted runner and derives from the events alone which tokens every
choice should have. Each position of the runner's memory holds the entire text it stands for (tenant
and tokens up to that position), so reading a wrong, stale, unwritten or foreign position is
detected at once. The sampled token depends on the seed, the output index and the entire text: any
order of steps must end in the same answers as serving each request on its own (`Answer.expected`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from msgspec.structs import replace

from ridgeline.engine.scheduler import (
    BlockPool,
    NoPrefixCache,
    PrefixCache,
    Scheduler,
    SchedulerLimits,
    make_policy,
)
from ridgeline.engine.scheduler.kv.cache_tiers import CacheTiers, NoStorage
from ridgeline.engine.scheduler.kv.memory_tier import Key, MemoryTier
from ridgeline.engine.scheduler.kv.prefix_cache import BlockCache
from ridgeline.engine.scheduler.plan import (
    Run,
    RunOutput,
    StepPlan,
    StepResult,
    draft_paths,
    sample_points,
)
from ridgeline.engine.scheduler.sequence import Sequence
from ridgeline.engine.scheduler.speculation.base import (
    DraftContext,
    DraftOutcome,
    DraftProposer,
    StepCapacity,
)
from ridgeline.engine.scheduler.stopping import derive_seed
from ridgeline.modelspec.cost.kv_layout import ONE_GROUP, KvLayout
from ridgeline.records import (
    Event,
    Failed,
    Finished,
    Preempted,
    Request,
    Sampling,
    Started,
    Token,
    TokenLogprobs,
)
from tests.invariants.checks import (
    Before,
    check_admitted,
    check_always,
    check_plan,
    check_time_to_live,
    check_trimmed,
)

EOS = 0
VOCAB = 12
Text = tuple[str, tuple[int, ...]]
Content = list[Any]
"""Of a slot of the memory tier: the group of layers of a block, and its positions."""


@dataclass(frozen=True)
class Setup:
    """Parameters of a scheduler."""

    num_blocks: int = 9
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 8
    chunked: bool = True
    policy: str = "continuous"
    wait_s: float = 2.0
    prefix: bool = True
    ttl_s: float | None = None
    aging_s: float = 5.0
    drafts: int = 0
    branches: int = 0
    background_tokens: int | None = 3
    tier_slots: int = 0  # of the memory tier, 0: no tiers
    storage: bool = False  # whether there is a tier below it, which loses and delays blocks
    window: int = 0  # of two groups of layers, 0: all layers see everything
    has_full: bool = True  # whether there are layers that see everything, too

    @property
    def layout(self) -> KvLayout:
        if not self.window:
            return ONE_GROUP
        full = (2,) if self.has_full else ()
        return KvLayout(full, ((0,), (1,)), self.window, tile_tokens=1)

    @property
    def capacity(self) -> int:
        """The longest sequence that fits."""
        longest = self.num_blocks * self.block_size
        run = self.max_num_batched_tokens if self.chunked else longest
        return self.layout.max_tokens(self.num_blocks, self.block_size, run, longest)

    def build(self, drafts: DraftProposer | None = None) -> Scheduler:
        pool = BlockPool(self.num_blocks, self.block_size)
        limits = SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.capacity,
            chunked_prefill=self.chunked,
            aging_s=self.aging_s,
            background_tokens=self.background_tokens,
            kv_layout=self.layout,
            prompt_logprob_tokens=(0.0, 0.6, 3.0)[self.num_blocks % 3],
        )
        cache: BlockCache = NoPrefixCache()
        if self.prefix:
            cache = PrefixCache(pool, self.ttl_s, self.layout)
            if self.tier_slots:
                cache.tiers = self._tiers(pool, cache)
        policy = make_policy(self.policy, wait_s=self.wait_s)
        return Scheduler(limits, policy, pool, cache, eos_token_ids=(EOS,), drafts=drafts)

    def _tiers(self, pool: BlockPool, cache: PrefixCache) -> CacheTiers:
        memory = MemoryTier(self.tier_slots)
        storage = UnreliableStorage(memory) if self.storage else NoStorage()
        return CacheTiers(
            pool, cache, memory, storage, layout=self.layout, block_bytes=1, min_tokens=3
        )


class UnreliableStorage:
    """Storage that writes and reads late, and now and then not at all."""

    def __init__(self, memory: MemoryTier) -> None:
        self.slots: list[Content] = [[] for _ in range(memory.num_slots)]
        self.num_loaded = 0
        self._memory, self._rng = memory, random.Random(memory.num_slots)
        self._stored: dict[Key, Content] = {}
        self._writes: list[tuple[Key, int]] = []
        self._loads: list[tuple[dict[Key, int], list[bool]]] = []

    def find(self, key: Key) -> str | None:
        return "disk" if key in self._stored else None

    def refresh(self) -> None:
        pass

    def load_s(self, keys: Seq[Key]) -> float:
        return 0.0

    def load(self, keys: Seq[Key]) -> Callable[[], bool] | None:
        if self._rng.random() < 0.1:
            return None
        slots = {key: slot for key in keys if (slot := self._memory.reserve()) is not None}
        over: list[bool] = []
        self._loads.append((slots, over))
        return lambda: bool(over)

    def store(self, blocks: Seq[tuple[Key, int]]) -> None:
        self._writes += blocks

    def tick(self) -> None:
        """End some of the writes that have begun."""
        while self._writes and self._rng.random() < 0.7:
            key, slot = self._writes.pop(0)
            if self._rng.random() < 0.9:
                self._stored[key] = list(self.slots[slot])
            self._memory.unpin([slot])
        while self._loads and self._rng.random() < 0.7:
            slots, over = self._loads.pop(0)
            for key, slot in slots.items():
                self._finish_load(key, slot)
            over.append(True)
        if self._stored and self._rng.random() < 0.1:
            del self._stored[self._rng.choice(list(self._stored))]

    def _finish_load(self, key: Key, slot: int) -> None:
        if key not in self._stored or self._rng.random() < 0.1:
            self._memory.give_back(slot)
            return
        self.slots[slot] = list(self._stored[key])
        self.num_loaded += self._memory.publish(key, slot, "disk")


def sample(seed: int, text: tuple[int, ...], index: int, banned: tuple[int, ...]) -> int:
    """The scripted model: the token depends on everything it is allowed to depend on."""
    digest = blake2b(repr((seed, text, index)).encode(), digest_size=8).digest()
    token = int.from_bytes(digest, "little") % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


@dataclass
class Answer:
    """One choice: its tokens so far, and what they must be in the end (`expected`)."""

    request: Request
    seed: int
    tokens: list[int]
    expected: list[int] = field(default_factory=list)
    reason: str | None = None

    def __post_init__(self) -> None:
        self.expected = list(self.tokens)
        while self.expected_reason is None:
            self.expected.append(self.next_token(self.expected))

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def expected_reason(self) -> str | None:
        sampling, num_output = self.request.sampling, len(self.expected) - self.num_prompt
        if num_output and self.expected[-1] == EOS and not sampling.ignore_eos:
            return "stop"
        return "length" if num_output == sampling.max_tokens else None

    def next_token(self, tokens: list[int]) -> int:
        index = len(tokens) - self.num_prompt
        sampling = self.request.sampling
        banned = () if sampling.ignore_eos or index >= sampling.min_tokens else (EOS,)
        return sample(self.seed, tuple(tokens), index, banned)


class OracleProposer:
    """Proposes drafts of up to `max_drafts` tokens, each right with probability 3/4.

    Adds up to `branches` alternative chains to each.
    """

    def __init__(self, world: World, max_drafts: int, branches: int) -> None:
        self._world, self._max_drafts, self._branches = world, max_drafts, branches
        self._rng = random.Random(max_drafts)
        self.num_outcomes = 0

    def should_propose(self, runs: Seq[Run]) -> bool:
        return True

    def counters(self) -> dict[str, float]:
        return {}

    def alternatives(self, seq_id: int) -> Seq[tuple[int, ...]]:
        chains = [self._chain(seq_id) for _ in range(self._rng.randint(0, self._branches))]
        return [chain for chain in chains if chain]

    def propose(self, contexts: Seq[DraftContext], capacity: StepCapacity) -> list[tuple[int, ...]]:
        assert capacity.num_free > 0 and capacity.num_runs >= len(contexts)
        return [self._draft(context) for context in contexts]

    def observe(self, outcomes: Seq[DraftOutcome]) -> None:
        self.num_outcomes += len(outcomes)

    def forget(self, seq_id: int, tokens: Seq[int], tenant: str) -> None:
        pass

    def _draft(self, context: DraftContext) -> tuple[int, ...]:
        seq = self._world.scheduler._registry.find_running(context.seq_id)
        assert seq is not None and context.tokens == seq.tokens
        assert context.tenant == seq.request.tenant
        return self._chain(context.seq_id)

    def _chain(self, seq_id: int) -> tuple[int, ...]:
        seq = self._world.scheduler._registry.find_running(seq_id)
        assert seq is not None
        future = self._world.answers[seq.request.id, seq.index].expected[len(seq.tokens) :]
        future = future[: self._rng.randint(0, self._max_drafts)]
        return tuple(t if self._rng.random() < 0.75 else (t + 1) % VOCAB for t in future)


class _Table(NamedTuple):
    """A run's block table for one group of layers, which see the last `span` positions."""

    group: int
    blocks: tuple[int, ...]
    first_place: int
    span: int

    def block_of(self, position: int, block_size: int) -> int:
        place = position // block_size - self.first_place
        assert place >= 0, "a block that was given back is used"
        return self.blocks[place]


class World:
    """A scheduler, its runner's memory, and the answers according to the events so far."""

    def __init__(self, setup: Setup) -> None:
        drafts = OracleProposer(self, setup.drafts, setup.branches) if setup.drafts else None
        self.setup, self.scheduler, self.now_s = setup, setup.build(drafts), 0.0
        self.slots: list[list[Text | None]] = [
            [None] * setup.block_size for _ in range(setup.num_blocks)
        ]
        tiers = self.scheduler.cache.tiers
        self.tiers = tiers if isinstance(tiers, CacheTiers) else None
        self.storage: UnreliableStorage | None = None
        self.tier_slots: list[Content] = [[] for _ in range(setup.tier_slots)]
        self.num_tier_loads = 0
        if self.tiers is not None and isinstance(self.tiers.storage, UnreliableStorage):
            self.storage = self.tiers.storage
            self.storage.slots = self.tier_slots
        self.group_of: dict[int, int] = {}  # block -> the group of layers that wrote it
        self.answers: dict[tuple[str, int], Answer] = {}
        self.started: set[str] = set()
        self.num_requests = self.num_steps = self.num_preempted = self.num_copies = 0
        self.num_accepted = self.num_branched = 0
        self.max_steps = 0  # that all requests added so far may take together
        self.used_s: dict[int, float] = {}  # block -> when it last had an owner

    # -- operations, allowed in any order

    def add(
        self,
        prompt: tuple[int, ...],
        sampling: Sampling,
        *,
        priority: int = 0,
        tenant: str = "",
        deadline_s: float | None = None,
        background: bool = False,
    ) -> None:
        request = Request(
            id=f"request{self.num_requests}",
            prompt=prompt,
            sampling=sampling,
            arrival_s=self.now_s,
            priority=priority,
            tenant=tenant,
            deadline_s=deadline_s,
            background=background,
        )
        self.scheduler.add(request)
        assert sampling.seed is not None
        for index in range(sampling.n):
            self._answer(request, index, list(prompt))
        self.num_requests += 1
        self.check()

    def cancel(self, request_id: str) -> None:
        self._record_use()
        self._receive(self.scheduler.cancel(request_id, self.now_s))
        assert not self.unfinished(request_id)
        self.check()

    def fail(self, request_id: str) -> None:
        self._record_use()
        self._receive(self.scheduler.fail(request_id, "for a reason", self.now_s))
        assert not self.unfinished(request_id)
        self.check()

    def finish(self, request_id: str, index: int) -> None:
        self._record_use()
        self._receive(self.scheduler.finish(request_id, index, stop_reason="x", now_s=self.now_s))
        self.check()

    def fork(self, seq: Sequence) -> None:
        source = self.answers[seq.request.id, seq.index]
        index = self.scheduler.fork(seq.request.id, seq.index)
        self._answer(source.request, index, list(source.tokens))
        self.check()

    def step(self) -> bool:
        """Plan, run, commit; False if there was nothing to run."""
        scheduler, before = self.scheduler, Before(self)
        self._record_use()
        if self.storage is not None:
            self.storage.tick()
        plan = scheduler.plan(self.now_s)
        self._transfer(plan)
        self.check()
        check_plan(self, plan, before)
        check_admitted(self, before)
        check_time_to_live(self)
        result = self._run(plan)
        self.now_s += 0.125
        self._record_use()
        self._receive(scheduler.commit(plan, result, self.now_s))
        self.check()
        check_trimmed(self)
        self.num_steps += 1
        return bool(plan.runs)

    def drain(self) -> None:
        """Step until every request is served, within a number of steps that excludes starvation."""
        for _ in range(self.max_steps):
            if not self.scheduler.has_work:
                break
            if not self.step() and self.scheduler.has_work:
                wake_s = self.scheduler.next_wake_s(self.now_s)
                assert wake_s is not None, "requests wait, but no wake-up is due"
                self.now_s = max(self.now_s, wake_s)
        assert not self.scheduler.has_work, "a request starves"
        assert self.scheduler.pool.num_owned == 0
        assert all(answer.reason for answer in self.answers.values())

    # -- state

    @property
    def running(self) -> list[Sequence]:
        return self.scheduler._registry.running

    def unfinished(self, request_id: str | None = None) -> list[tuple[str, int]]:
        return [
            key
            for key, answer in self.answers.items()
            if answer.reason is None and request_id in (None, key[0])
        ]

    # -- the runner

    def _run(self, plan: StepPlan) -> StepResult:
        self._copy(plan)
        return StepResult(tuple([self._take(run) for run in plan.runs]))

    def _transfer(self, plan: StepPlan) -> None:
        """Move blocks to and from the memory tier, one after the other."""
        for block, slot in plan.stores:
            self.tier_slots[slot] = [self.group_of[block], *self.slots[block]]
        for slot, block in plan.loads:
            self.group_of[block], *self.slots[block] = self.tier_slots[slot]
            self.used_s[block] = self.now_s
        self.num_tier_loads += len(plan.loads)

    def _copy(self, plan: StepPlan) -> None:
        """Perform all copies at once, as a device would."""
        sources, targets = [a for a, _ in plan.copies], [b for _, b in plan.copies]
        assert not set(sources) & set(targets), "a block is both read and written by copies"
        assert len(set(targets)) == len(targets)
        self.num_copies += len(plan.copies)
        for target, content in zip(targets, [list(self.slots[a]) for a in sources], strict=True):
            self.slots[target] = content
        for source, target in plan.copies:
            self.group_of[target] = self.group_of[source]

    def _take(self, run: Run) -> RunOutput:
        """Compute all paths and take the longest output, the last one among equals."""
        outputs = [self._compute(path) for path in draft_paths(run)]
        path = max(range(len(outputs)), key=lambda i: (len(outputs[i].tokens), i))
        self.num_accepted += max(0, len(outputs[path].tokens) - 1)
        self.num_branched += path > 0
        return replace(outputs[path], path=path)

    def _compute(self, run: Run) -> RunOutput:
        seq = self.scheduler._registry.find_running(run.seq_id)
        assert seq is not None
        answer = self.answers[seq.request.id, seq.index]
        end = run.start + len(run.tokens) - run.num_drafts
        known = list(run.tokens[: end - run.start])
        assert known == answer.tokens[run.start : end], "tokens lost or duplicated"
        for table in self._tables(run):
            for position in range(max(0, run.start - table.span + 1), run.start):
                assert self._slot(table, position) == _text(answer, position), (
                    "attention reads a wrong position"
                )
        fed = (*answer.tokens[:end], *run.drafts)
        for table in self._tables(run):
            for position in range(run.start, len(fed)):
                self._write(table, position, (answer.request.tenant, fed[: position + 1]))
        if run.sample is None:
            assert end < len(answer.tokens) and not run.num_drafts
            return RunOutput(prompt_logprobs=self._prompt_logprobs(run))
        assert end == len(answer.tokens) and run.sample.seed == answer.seed
        tokens = tuple(self._walk(run, fed, end, answer.num_prompt))
        return RunOutput(tokens, prompt_logprobs=self._prompt_logprobs(run))

    def _walk(self, run: Run, fed: tuple[int, ...], end: int, num_prompt: int) -> Iterator[int]:
        """The target model's tokens, as long as the drafts agree with them."""
        for i, point in enumerate(sample_points(run)):
            assert point.index == end + i - num_prompt
            token = sample(point.seed, fed[: end + i], point.index, point.banned)
            yield token
            if (token,) != fed[end + i : end + i + 1]:
                return

    def _tables(self, run: Run) -> list[_Table]:
        layout = self.setup.layout
        assert bool(run.blocks) == bool(layout.full)
        assert len(run.windows) == len(layout.windowed)
        full = [_Table(0, run.blocks, 0, 1 << 30)] if layout.full else []
        windows = [
            _Table(1 + j, table, run.first_place, self.setup.window)
            for j, table in enumerate(run.windows)
        ]
        return [*full, *windows]

    def _slot(self, table: _Table, position: int) -> Text | None:
        block = table.block_of(position, self.setup.block_size)
        assert self.group_of[block] == table.group, "layers read a block of other layers"
        return self.slots[block][position % self.setup.block_size]

    def _write(self, table: _Table, position: int, text: Text) -> None:
        block = table.block_of(position, self.setup.block_size)
        self.group_of[block] = table.group
        pool = self.scheduler.pool
        assert pool.ref_count(block) == 1, "a shared block is written"
        assert not pool.is_published(block), "a published block is written"
        self.slots[block][position % self.setup.block_size] = text

    def _prompt_logprobs(self, run: Run) -> tuple[TokenLogprobs, ...]:
        if run.prompt_logprobs is None:
            return ()
        last = () if run.next_prompt_token is None else (run.next_prompt_token,)
        return tuple(TokenLogprobs(token, -1.0, 1, ()) for token in (*run.tokens[1:], *last))

    # -- events

    def _answer(self, request: Request, index: int, tokens: list[int]) -> None:
        answer = Answer(request, derive_seed(request.sampling.seed or 0, index), tokens)
        self.answers[request.id, index] = answer
        self.max_steps += len(answer.expected) + 2 + 8 * bool(self.setup.tier_slots)

    def _receive(self, events: list[Event]) -> None:
        for event in events:
            assert event.at_s <= self.now_s
            if isinstance(event, Started):
                self._receive_started(event)
            elif isinstance(event, Token):
                self._receive_token(event)
            elif isinstance(event, Finished):
                self._receive_finished(event)
            elif isinstance(event, Failed):
                for key in self.unfinished(event.request_id):
                    self.answers[key].reason = "failed"
            else:
                assert isinstance(event, Preempted)
                self.num_preempted += 1

    def _receive_started(self, event: Started) -> None:
        assert event.request_id not in self.started, "started twice"
        self.started.add(event.request_id)

    def _receive_token(self, event: Token) -> None:
        answer = self.answers[event.request_id, event.index]
        assert answer.reason is None and event.request_id in self.started
        first = len(answer.tokens) == answer.num_prompt
        if first and not event.index and answer.request.sampling.prompt_logprobs is not None:
            assert event.prompt_logprobs is not None and event.prompt_logprobs[0] is None
            tokens = [entry.token for entry in event.prompt_logprobs[1:] if entry is not None]
            assert tokens == list(answer.request.prompt[1:])
        else:
            assert event.prompt_logprobs is None
        answer.tokens.append(event.token)

    def _receive_finished(self, event: Finished) -> None:
        answer = self.answers[event.request_id, event.index]
        assert answer.reason is None, "finished twice"
        assert event.usage.completion_tokens == len(answer.tokens) - answer.num_prompt
        assert event.usage.prompt_tokens == answer.num_prompt > event.usage.cached_tokens
        assert answer.tokens == answer.expected[: len(answer.tokens)], (
            "differs from serving the request on its own"
        )
        if event.reason != "abort" and event.stop_reason is None:
            assert answer.tokens == answer.expected and event.reason == answer.expected_reason
        answer.reason = event.reason

    def check(self) -> None:
        self._record_use()
        check_always(self)

    def _record_use(self) -> None:
        pool = self.scheduler.pool
        owned = (block for block in range(pool.num_blocks) if pool.ref_count(block))
        self.used_s.update(dict.fromkeys(owned, self.now_s))


def _text(answer: Answer, position: int) -> Text:
    return answer.request.tenant, tuple(answer.tokens[: position + 1])
