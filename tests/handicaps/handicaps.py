"""Servers with planted faults, what mends each, and the truth about every configuration."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.errors import UserError
from ridgeline.measure.goodput_search import is_saturated
from ridgeline.measure.metrics.goodput import goodput
from ridgeline.optimize.environment import Load
from ridgeline.optimize.ladder import RungCandidate, candidates_of, unmet_need
from ridgeline.records import Slo
from ridgeline.twin.config import TwinConfig
from tests.handicaps.virtual_servers import Traffic, VirtualServers

SLO = "ttft:2000 tpot:100"
BUDGET_S = 1200.0
PERMITTED_LOSS = 0.05  # nats of noise on log-probabilities that the quality panel passes
WINDOW_S, GRACE_S = 10.0, 6.0  # of a true run
LEAST_RATE = 0.02
NEAR = 1.04  # relative width at which the bisection of a true goodput ends
SEEDS = (11, 12, 13)  # of arrivals; a careful figure is the mean of all

Mended = Callable[[TwinConfig, TwinConfig], bool]
"""Whether the second configuration has mended the fault of the first."""


@dataclass(frozen=True)
class Fault:
    """A planted fault and the test that it is gone."""

    name: str
    mended: Mended


SLOTS = Fault("too few slots", lambda a, b: _slots(b) >= 4 * _slots(a))
NO_PREFIX = Fault("no prefix caching", lambda a, b: b.enable_prefix_caching)
EAGER = Fault("no captured graphs", lambda a, b: b.host.layer_s == 0.0)
SYNC = Fault("no overlapped scheduling", lambda a, b: b.host.step_s == 0.0)
UNCHUNKED = Fault("prompts are not chunked", lambda a, b: b.enable_chunked_prefill)
SMALL_BUDGET = Fault(
    "token budget too small",
    lambda a, b: (b.max_num_batched_tokens or 0) >= 4 * (a.max_num_batched_tokens or 1),
)
MEMORY = Fault("memory share too small", lambda a, b: b.utilization > a.utilization + 0.03)
IDLE_DEVICES = Fault("idle devices", lambda a, b: b.num_devices > a.num_devices)
WRONG_TP = Fault("tensor parallel in place of replicas", lambda a, b: b.tp < a.tp)
DRAFTS = Fault(
    "speculation that never pays", lambda a, b: b.num_speculative_tokens < a.num_speculative_tokens
)
NO_DRAFTS = Fault("no speculation", lambda a, b: b.num_speculative_tokens > 0)
LONG_DRAFTS = Fault(
    "drafts of which few are accepted",
    lambda a, b: 2 * b.num_speculative_tokens <= a.num_speculative_tokens,
)
SMALL_TP = Fault("tensor parallel too small for the TPOT limit", lambda a, b: b.tp > a.tp)
NO_OFFLOAD = Fault(
    "prefixes beyond the device's memory",
    lambda a, b: b.offload_bytes > a.offload_bytes or b.offload_ratio > a.offload_ratio,
)


def _slots(config: TwinConfig) -> int:
    return (config.max_num_seqs or 1) * config.dp


@dataclass(frozen=True)
class Handicap:
    """One server to tune, its planted faults, and the traffic on it."""

    name: str
    server: str
    flags: str
    faults: tuple[Fault, ...]
    traffic: Traffic = field(default_factory=lambda: Traffic(prompt=384, output=64))
    device: str = "l4"
    model: str = "llama-3.1-8b"
    num_devices: int = 1
    acceptance: float = 0.05
    loss_nats: float = 0.03
    slo: str = SLO

    @property
    def lossy_permitted(self) -> bool:
        """Whether lossy rungs are within the limits of the quality panel here."""
        return self.loss_nats <= PERMITTED_LOSS

    def servers(self, seed: int = 0) -> VirtualServers:
        return VirtualServers(
            self.server,
            self.flags,
            traffic=self.traffic,
            device=self.device,
            model=self.model,
            num_devices=self.num_devices,
            acceptance=self.acceptance,
            loss_nats=self.loss_nats,
            belief=1.15 if seed % 2 == 0 else 0.87,
            num_runs=1000 * seed,
        )


SHARED = Traffic(prompt=1536, output=32, shared=1024, num_prefixes=4)
LONG = Traffic(prompt=3072, output=64)
SHORT = Traffic(prompt=96, output=96)
CHATTY = Traffic(prompt=64, output=512)
UNCHUNKED_FLAGS = "--no-enable-chunked-prefill --max-model-len 4096"
DIALOGUE = Traffic(prompt=384, output=64)

HANDICAPS = (
    Handicap("vllm slots", "vllm", "--max-num-seqs 4", (SLOTS,)),
    Handicap("vllm one slot", "vllm", "--max-num-seqs 1", (SLOTS,)),
    Handicap("vllm prefix", "vllm", "--no-enable-prefix-caching", (NO_PREFIX,), SHARED),
    Handicap(
        "vllm eager and synchronous",
        "vllm",
        "--enforce-eager --no-async-scheduling --max-num-seqs 64",
        (EAGER, SYNC),
        CHATTY,
        model="qwen3-0.6b",
        slo="ttft:2000 tpot:8",
    ),
    Handicap(
        "vllm unchunked", "vllm", UNCHUNKED_FLAGS, (UNCHUNKED,), LONG, slo="ttft:9000 tpot:90"
    ),
    Handicap(
        "vllm prefix and slots",
        "vllm",
        "--no-enable-prefix-caching --max-num-seqs 4",
        (NO_PREFIX, SLOTS),
        SHARED,
    ),
    Handicap("vllm memory", "vllm", "--gpu-memory-utilization 0.85", (MEMORY,), LONG),
    Handicap("vllm idle devices", "vllm", "", (IDLE_DEVICES,), LONG, num_devices=4),
    Handicap(
        "vllm wrong tp",
        "vllm",
        "--tensor-parallel-size 4",
        (WRONG_TP,),
        LONG,
        num_devices=4,
    ),
    Handicap("vllm small budget", "vllm", "--max-num-batched-tokens 64", (SMALL_BUDGET,)),
    Handicap(
        "vllm no speculation on copies",
        "vllm",
        "",
        (NO_DRAFTS,),
        SHORT,
        acceptance=0.8,
        slo="ttft:2000 tpot:65",
    ),
    Handicap("sglang slots", "sglang", "--max-running-requests 4", (SLOTS,)),
    Handicap(
        "sglang prefix", "sglang", "--disable-radix-cache", (NO_PREFIX,), SHARED, loss_nats=0.5
    ),
    Handicap(
        "sglang eager and synchronous",
        "sglang",
        "--disable-cuda-graph --disable-overlap-schedule --max-running-requests 64",
        (EAGER, SYNC),
        CHATTY,
        model="qwen3-0.6b",
        slo="ttft:2000 tpot:8",
    ),
    Handicap(
        "sglang memory and slots",
        "sglang",
        "--mem-fraction-static 0.82 --max-running-requests 2",
        (SLOTS,),
        DIALOGUE,
    ),
    Handicap("trtllm slots", "trtllm", "--max_batch_size 4", (SLOTS,)),
    Handicap(
        "trtllm budget",
        "trtllm",
        "--enable_chunked_prefill --max_num_tokens 64",
        (SMALL_BUDGET,),
        DIALOGUE,
    ),
    Handicap("tgi slots", "tgi", "--max-concurrent-requests 4", (SLOTS,), loss_nats=0.5),
    Handicap("llama.cpp one slot", "llama-server", "--parallel 1", (SLOTS,)),
    Handicap(
        "llama.cpp slots and prefix",
        "llama-server",
        "--parallel 2 --no-cache-prompt",
        (SLOTS, NO_PREFIX),
        SHARED,
    ),
)

LOST_DRAFTS = (
    '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 8, '
    '"prompt_lookup_min": 2, "prompt_lookup_max": 4}\''
)
LLAMA_DRAFTS = "--spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 16"

UNTUNED = (
    Handicap(
        "vllm small tp",
        "vllm",
        "--tensor-parallel-size 2 --data-parallel-size 2",
        (SMALL_TP,),
        Traffic(prompt=512, output=128),
        device="h200-sxm",
        model="llama-3.1-70b",
        num_devices=4,
        loss_nats=0.5,
        slo="ttft:2000 tpot:16",
    ),
    Handicap(
        "vllm losing drafts",
        "vllm",
        LOST_DRAFTS,
        (DRAFTS,),
        DIALOGUE,
        device="a100-80-sxm",
        model="mistral-7b",
        slo="ttft:1500 tpot:40",
    ),
    Handicap(
        "sglang prefixes beyond memory",
        "sglang",
        "",
        (NO_OFFLOAD,),
        Traffic(prompt=4608, output=64, shared=4096, num_prefixes=96),
        device="l40s",
        model="qwen3-8b",
        slo="ttft:4000 tpot:100",
    ),
    Handicap(
        "sglang long drafts",
        "sglang",
        "--speculative-algorithm NGRAM --speculative-num-draft-tokens 16",
        (LONG_DRAFTS,),
        SHORT,
        device="l40s",
        model="qwen3-14b",
        acceptance=0.6,
        slo="ttft:2000 tpot:60",
    ),
    Handicap(
        "sglang experts on idle devices",
        "sglang",
        "--tp-size 2",
        (IDLE_DEVICES,),
        Traffic(prompt=2048, output=128),
        device="l40s",
        model="qwen3-30b-a3b",
        num_devices=4,
        loss_nats=0.5,
        slo="ttft:3000 tpot:60",
    ),
    Handicap(
        "llama.cpp slots and losing drafts",
        "llama-server",
        f"--parallel 2 {LLAMA_DRAFTS}",
        (SLOTS, DRAFTS),
        Traffic(prompt=128, output=64),
        device="a10",
        model="qwen3-8b",
        slo="ttft:5000 tpot:150",
    ),
    Handicap(
        "llama.cpp small batch",
        "llama-server",
        "--parallel 16 --batch-size 32 --ubatch-size 32",
        (SMALL_BUDGET,),
        DIALOGUE,
        device="a100-40-sxm",
        model="phi-4",
    ),
    Handicap(
        "trtllm memory and slots",
        "trtllm",
        "--tp_size 2 --kv_cache_free_gpu_memory_fraction 0.45 --max_batch_size 8",
        (SLOTS, MEMORY),
        LONG,
        device="b200",
        model="llama-3.1-70b",
        num_devices=2,
        slo="ttft:3000 tpot:60",
    ),
)
"""Written on 2026-11-28, before any search had seen them: what was tuned on `HANDICAPS` is tried on
these."""


class Truth:
    """Exact goodput of configurations of one handicap: without noise, of long runs."""

    def __init__(self, handicap: Handicap) -> None:
        self.handicap, self.servers = handicap, handicap.servers()
        self._slo = Slo.parse(handicap.slo)
        self._known: dict[TwinConfig, float] = {}
        self._careful: dict[TwinConfig, float] = {}
        self._last = 4.0

    def goodput(self, settings: Settings) -> float:
        """Requests/s within the SLO at the knee, at least `LEAST_RATE`; 0 if it does not start.

        Of one sequence of arrivals, so that neighbours are compared on the same one.
        """
        try:
            config = self.servers.config(settings)
            if config not in self._known:
                self._known[config] = self._knee(settings)
        except UserError:
            return 0.0
        return self._known[config]

    def careful_goodput(self, settings: Settings) -> float:
        """The same as the geometric mean over several sequences of arrivals: what was chosen for
        its figure on one of them is no longer favoured.
        """
        config = self.servers.config(settings)
        if config not in self._careful:
            knees = [self.goodput(settings), *(self._knee(settings, s) for s in SEEDS[1:])]
            self._careful[config] = statistics.geometric_mean(knees)
        return self._careful[config]

    def _knee(self, settings: Settings, seed: int = SEEDS[0]) -> float:
        """By doubling or halving from the last one found, then bisection."""
        low = high = self._last
        if self._holds(settings, low, seed):
            while self._holds(settings, high := 2 * low, seed):
                low = high
        else:
            while not self._holds(settings, low := high / 2, seed):
                high = low
                if low < LEAST_RATE:
                    return LEAST_RATE
        while high / low > NEAR:
            middle = float(statistics.geometric_mean((low, high)))
            low, high = (middle, high) if self._holds(settings, middle, seed) else (low, middle)
        self._last = low
        return low

    def _holds(self, settings: Settings, rate: float, seed: int = SEEDS[0]) -> bool:
        window_s = max(WINDOW_S, 20 / rate)
        load = Load(rate=rate, seed=seed, window_s=window_s, grace_s=GRACE_S)
        run = self.servers.simulate(settings, load)
        return goodput(run, self._slo).holds and not is_saturated(run)

    def neighbours(self, settings: Settings) -> Iterator[RungCandidate]:
        """Every change of one rung that applies to these settings and that quality permits."""
        facts = {**self.servers.environment().facts, **msgspec.structs.asdict(settings)}
        permitted = ("exact", "lossy") if self.handicap.lossy_permitted else ("exact",)
        for rung in self.servers.ladder.rungs:
            if rung.honesty in permitted and unmet_need(rung, facts) is None:
                yield from candidates_of(rung, settings, {})

    def best_known(self) -> float:
        """The careful goodput of the best of greedy ascents by true goodput, from the start and
        from the defaults.
        """
        starts = (self.servers.start, self.servers.defaults)
        return max(self.careful_goodput(self._ascent(start)) for start in starts)

    def _ascent(self, settings: Settings) -> Settings:
        """Change one rung after another, each time to the best neighbour, while one is better."""
        best = self.goodput(settings)
        while True:
            start, nearby = best, {self._config(settings)}
            for candidate in [c.settings for c in self.neighbours(settings)]:
                config = self._config(candidate)
                if config is None or config in nearby:
                    continue  # it does not start, or is the same server
                nearby.add(config)
                if self._reaches(candidate, NEAR * best):
                    best, settings = self.goodput(candidate), candidate
            if best == start:
                return settings

    def _config(self, settings: Settings) -> TwinConfig | None:
        """The twin of the settings; None for one that does not start."""
        try:
            return self.servers.config(settings)
        except UserError:
            return None

    def _reaches(self, settings: Settings, rate: float) -> bool:
        """Whether a configuration holds this rate: one run in place of the search for its knee."""
        try:
            config = self.servers.config(settings)
            if config in self._known:
                return self._known[config] > rate
            return self._holds(settings, rate)
        except UserError:
            return False
