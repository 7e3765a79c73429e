"""An engine on a virtual clock, and faults put into it whose name is known.

The scheduler, the blocks and the prefix cache are the engine's own; the runner is a step time with
terms for reading weights, sequences, tokens and KV. A fault changes the engine, the load, or what
the client sees of it; it never touches what diagnosis looks at except through these.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count

import msgspec

from ridgeline.diagnose.facts import facts_of
from ridgeline.diagnose.losses.latency_losses import Expected, LatencyLosses, attribute_latency
from ridgeline.diagnose.losses.step_facts import missed_prefix, step_facts
from ridgeline.diagnose.rules.findings import RankedFinding, findings
from ridgeline.engine.scheduler.admission.limits import SchedulerLimits
from ridgeline.engine.scheduler.batching import make_policy
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.prefix_cache import NoPrefixCache, PrefixCache
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.measure.workload.sharing import shared_prompt_share
from ridgeline.plan.simulate.single import Arrival, simulate
from ridgeline.records import EngineInfo, RunTrace, Slo

BLOCK = 16
SLO = Slo.parse("ttft:1500 tpot:60")


@dataclass(frozen=True)
class Load:
    """A workload: how prompts are made, how long answers are, how fast requests come."""

    name: str
    shared: int  # tokens of a common prefix
    groups: int
    body: tuple[int, int]
    output: tuple[int, int]
    rate: float
    count: int = 90


LOADS = (
    Load("chat", shared=192, groups=1, body=(20, 120), output=(30, 90), rate=6.0),
    Load("rag", shared=384, groups=4, body=(100, 300), output=(15, 40), rate=3.5),
    Load("code", shared=512, groups=2, body=(30, 200), output=(40, 120), rate=3.0),
)


@dataclass(frozen=True)
class Engine:
    """A configuration, the machine's step time (seconds), and what goes wrong around it."""

    slots: int = 32
    budget: int = 256
    chunked: bool = True
    batching: str = "continuous"
    blocks: int = 3000
    caching: bool = True
    step_s: float = 0.012
    run_s: float = 0.0004
    token_s: float = 0.0001
    slower: float = 1.0
    slower_every: int = 1  # one step in this many is affected
    taken: float = 0.1  # share of the CPU time that the engine needs
    plan_s: float = 0.0002
    gap_s: float = 0.00005
    tokenize_s: float = 0.001
    send_every_s: float = 0.0
    read_late_s: float = 0.0

    def expected(self, shapes, num_sampled=0) -> float:
        """Step time of an undisturbed machine."""
        num_tokens = sum(new for new, _ in shapes)
        return self.step_s + self.run_s * len(shapes) + self.token_s * num_tokens


def arrivals(load: Load, seed: int) -> list[Arrival]:
    rng = random.Random(f"{load.name}/{seed}")
    heads = [
        tuple(random.Random(g).choices(range(1000), k=load.shared)) for g in range(load.groups)
    ]
    at_s, found = 0.0, []
    for _ in range(load.count):
        body = tuple(rng.choices(range(1000), k=rng.randint(*load.body)))
        prompt = rng.choice(heads) + body
        found.append(Arrival(at_s=at_s, prompt=prompt, num_output=rng.randint(*load.output)))
        at_s += rng.expovariate(load.rate)
    return found


def scheduler(engine: Engine) -> Scheduler:
    pool = BlockPool(engine.blocks, BLOCK)
    limits = SchedulerLimits(
        max_num_seqs=engine.slots,
        max_num_batched_tokens=engine.budget,
        max_model_len=2048,
        chunked_prefill=engine.chunked,
    )
    cache = PrefixCache(pool, None) if engine.caching else NoPrefixCache()
    return Scheduler(limits, make_policy(engine.batching), pool, cache)


def run(engine: Engine, load: Load, seed: int = 0) -> tuple[RunTrace, float]:
    """The run's record, and how much of its prompts could have been shared."""
    asked = arrivals(load, seed)
    sent, arrived = _delays(engine, asked)
    noise, steps_so_far = random.Random(f"noise/{seed}"), count()

    def seconds(shapes, num_sampled):
        slower = engine.slower if next(steps_so_far) % engine.slower_every == 0 else 1.0
        steady = engine.expected(shapes) * slower * noise.uniform(0.97, 1.05)
        return steady + engine.plan_s + engine.gap_s

    late = [replace_at(a, at_s) for a, at_s in zip(asked, arrived, strict=True)]
    done = simulate(scheduler(engine), late, seconds, end_s=600.0)
    requests = []
    for trace in done.requests:
        i = int(trace.id)
        seen = tuple(at + engine.read_late_s for at in trace.token_s)
        requests.append(
            msgspec.structs.replace(
                trace,
                scheduled_s=asked[i].at_s,
                sent_s=sent[i],
                token_s=seen,
                first_computed_s=trace.token_s[0] if trace.token_s else None,
                finished_s=(trace.finished_s or 0.0) + engine.read_late_s,
            )
        )
    steps = tuple(
        msgspec.structs.replace(
            step, plan_s=engine.plan_s, run_s=step.run_s - engine.plan_s - engine.gap_s
        )
        for step in done.steps
    )
    record = RunTrace(
        target="simulated",
        workload=load.name,
        arrivals=f"poisson:{load.rate}",
        seed=seed,
        started_unix_s=0.0,
        duration_s=done.duration_s,
        requests=tuple(requests),
        steps=steps,
        info=_info(engine),
    )
    return record, shared_prompt_share((a.prompt for a in asked), BLOCK)


def _delays(engine: Engine, asked: list[Arrival]) -> tuple[list[float], list[float]]:
    """When each request is sent, and when it reaches the scheduler (one tokenizer, in order)."""
    sent, arrived, may_send_s, free_s = [], [], 0.0, 0.0
    for each in asked:
        sent_s = max(each.at_s, may_send_s)
        may_send_s = sent_s + engine.send_every_s
        free_s = max(sent_s, free_s) + engine.tokenize_s
        sent.append(sent_s)
        arrived.append(free_s)
    return sent, arrived


def replace_at(arrival: Arrival, at_s: float) -> Arrival:
    return msgspec.structs.replace(arrival, at_s=at_s)


def _info(engine: Engine) -> EngineInfo:
    settings = {
        "max_num_seqs": engine.slots,
        "max_num_batched_tokens": engine.budget,
        "batching": engine.batching,
    }
    return EngineInfo(
        model="simulated",
        settings=settings,
        derivations={},
        max_model_len=2048,
        num_blocks=engine.blocks,
        block_size=BLOCK,
        weight_bytes=1,
        kv_bytes_per_token=1,
        device="cpu",
        compute_dtype="float32",
    )


@cache
def diagnosed(
    engine: Engine, load: Load, seed: int = 0, slo: Slo = SLO
) -> tuple[tuple[RankedFinding, ...], LatencyLosses]:
    """Exactly what `ridgeline diagnose` does with a run of its own engine."""
    record, shared = run(engine, load, seed)
    missed = missed_prefix(record, shared)
    healthy = replace(engine, slower=1.0)

    expected = Expected(
        seconds=lambda step: healthy.expected(step.shapes),
        between_s=Engine.plan_s + Engine.gap_s,
    )

    found = attribute_latency(
        record, missed_prefix=missed, expected=expected, token_budget=engine.budget
    )
    assert found is not None
    facts = {
        **facts_of(record, slo),
        **step_facts(record, expected),
        "missed_prefix_share": missed,
        "cpu_taken_share": engine.taken,
    }
    return findings(found, facts), found


@dataclass(frozen=True)
class Fault:
    """What is broken, how (per workload, since a limit binds at different loads), and its name."""

    name: str
    verdict: str
    causes: tuple[str, ...]
    change: Callable[[Engine, Load], Engine]
    slo: Slo = field(default=SLO)


def _fault(name: str, verdict: str, *causes: str, slo: Slo = SLO, **changes) -> Fault:
    def change(engine: Engine, load: Load) -> Engine:
        chosen = {k: v(load) if callable(v) else v for k, v in changes.items()}
        return replace(engine, **chosen)

    return Fault(name, verdict, causes, change, slo)


def _blocks_for(num_sequences: float) -> Callable[[Load], int]:
    """The shared prefixes once each, and the remaining tokens of the given number of sequences."""

    def blocks(load: Load) -> int:
        shared = load.groups * -(-load.shared // BLOCK)
        own = -(-(load.body[1] + load.output[1]) // BLOCK)
        return 1 + shared + round(num_sequences * own)

    return blocks


OVERLOADED = replace(Engine(), step_s=0.001, run_s=0.004, token_s=0.002, slots=24)
"""Steps with hardly any fixed cost; every load here exceeds its capacity."""
DECODING = replace(LOADS[0], body=(4, 8), shared=16, output=(60, 90))
"""Short prompts, so that most of the work is decoding."""

FAULTS = (
    _fault("few KV blocks", "kv-capacity-bound", "kv-cache-too-small", blocks=_blocks_for(2)),
    _fault(
        "hardly any KV block", "kv-capacity-bound", "kv-cache-too-small", blocks=_blocks_for(1.1)
    ),
    _fault("two slots", "queue-bound", "too-few-slots", slots=2),
    _fault("one slot", "queue-bound", "too-few-slots", slots=1),
    _fault(
        "two to three times what can be served",
        "overload-bound",
        "more-comes-than-can-be-served",
        step_s=0.001,
        run_s=0.004,
        token_s=0.002,
        slots=12,
    ),
    _fault(
        "more prompts than can be computed",
        "overload-bound",
        "more-prompts-than-can-be-computed",
        step_s=0.001,
        token_s=0.004,
        slots=64,
    ),
    _fault(
        "static batches of eight",
        "queue-bound",
        "batch-formed-too-rarely",
        "too-few-slots",
        batching="static",
        slots=8,
    ),
    _fault("no prefix cache", "prefix-miss-bound", "prompts-computed-again", caching=False),
    _fault(
        "a slow tokenizer",
        "host-overhead-bound",
        "slow-before-the-scheduler",
        tokenize_s=lambda load: 0.8 / load.rate,
    ),
    _fault(
        "a client that sends late",
        "client-bound",
        "client-sends-late",
        send_every_s=lambda load: 1.15 / load.rate,
    ),
    _fault("a client that reads late", "client-bound", "client-reads-late", read_late_s=0.8),
    _fault("a sleep in the scheduler", "host-overhead-bound", "host-between-steps", plan_s=0.012),
    _fault(
        "the loop is held up between steps",
        "host-overhead-bound",
        "host-between-steps",
        gap_s=0.010,
    ),
    _fault(
        "one core of two taken away",
        "machine-bound",
        "cores-taken-by-others",
        slower=1.8,
        taken=0.35,
    ),
    _fault(
        "a core shared with another process",
        "machine-bound",
        "cores-taken-by-others",
        slower=2.4,
        slower_every=3,
        taken=0.35,
    ),
    _fault("a throttled machine", "machine-bound", "machine-slower-than-it-was", slower=1.8),
    _fault(
        "prompts in one piece",
        "scheduling-interference-bound",
        "prefill-stalls-decode",
        budget=2048,
        chunked=False,
        token_s=0.0004,
    ),
    _fault(
        "a token budget of twelve",
        "prefill-compute-bound",
        "prompts-in-too-small-pieces",
        budget=12,
    ),
    _fault(
        "too many sequences per step",
        "over-batching-bound",
        "over-batched",
        run_s=0.010,
        slots=64,
    ),
)
