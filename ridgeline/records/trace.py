"""Traces of requests, steps and runs.

Engine, load client, simulator and production write the same records; every metric is a pure
function over them (`ridgeline.measure.metrics`).
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from ridgeline.records.request import SamplingDefaults

CountedBy = Literal["server", "tokenizer", "chunks"]

TIMEOUT, CANCELLED = "timeout", "cancelled"
"""`RequestTrace.error` starts with one of these if the client gave up, or cancelled the request."""


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times are seconds since the run began (None: it did not happen).

    `scheduled_s`: when the workload scheduled it. `sent_s`: when the client sent it. `started_s`:
    when the engine first ran it (None if the server does not report it). `first_computed_s`: when
    the engine had computed the first token. `token_s[i]`: when the i-th chunk with output arrived,
    carrying `token_counts[i]` tokens, as counted by the server, by a tokenizer, or as one per chunk
    (`counted_by`). `reasoned`: the output began with reasoning; `visible_s`: when the answer after
    it began (None: never).
    """

    id: str
    kind: str
    scheduled_s: float
    sent_s: float
    started_s: float | None
    token_s: tuple[float, ...]
    token_counts: tuple[int, ...]
    finished_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requested_tokens: int | None
    finish_reason: str | None
    error: str | None = None
    text: str = ""
    counted_by: CountedBy = "server"
    first_computed_s: float | None = None
    reasoned: bool = False
    visible_s: float | None = None


class StepStat(msgspec.Struct, frozen=True, kw_only=True):
    """One engine step. `shapes`: (new tokens, tokens already in the KV cache) of each run."""

    index: int
    at_s: float
    plan_s: float
    run_s: float
    shapes: tuple[tuple[int, int], ...]
    num_sampled: int
    num_running: int
    num_waiting: int
    used_blocks: int
    num_blocks: int
    max_num_seqs: int
    num_preempted: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(new for new, _ in self.shapes)


TWIN_OF = "a twin of "  # begins the device of a server that only models it
_TWIN_SPEED = re.compile(r", (\S+) times as fast$")


def twin_speed(devices: str) -> float:
    """Modelled seconds per second of a twin of these devices ("…, modelled, 10 times as fast")."""
    found = _TWIN_SPEED.search(devices)
    return 1.0 if found is None else float(found[1])


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The served model, every resolved setting, and how each default was derived.

    `pooling` and `normalize`: how the model's own files say that its embeddings are made.
    `default_sampling`: what requests get that leave these parameters out. A block holds positions
    of one of `num_kv_groups` groups of layers. `adapters`: names of the loaded adapters.
    """

    model: str
    settings: dict[str, object]
    derivations: dict[str, str]
    max_model_len: int
    num_blocks: int
    block_size: int
    weight_bytes: int
    kv_bytes_per_token: int
    device: str
    compute_dtype: str
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True
    vocab_size: int | None = None
    default_sampling: SamplingDefaults = SamplingDefaults()
    num_kv_groups: int = 1
    adapters: tuple[str, ...] = ()

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds in all layers; with windows, long sequences need less."""
        return self.num_blocks * self.block_size // self.num_kv_groups

    @property
    def twin(self) -> str:
        """The devices that a server only models ("1 x h100-sxm, modelled"); "" if it has its own.

        Ridgeline's own server says so as its device, twins of other servers in their metrics.
        """
        if self.device.startswith(TWIN_OF):
            return self.device.removeprefix(TWIN_OF)
        return str(self.settings.get("twin", ""))

    @property
    def twin_speed(self) -> float:
        """Modelled seconds per second; 1 for a server that is no twin."""
        return twin_speed(self.twin)


BUSY_SHARE = 0.10  # of the CPU taken by others; beyond it, figures are not comparable


class MachineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What other work took of the CPUs while a run was measured, as shares of their time.

    `others_share`: other processes. `stolen_share`: the host of a virtual machine. `waited_share`:
    of the CPU time that the measured processes demanded, what their threads waited for.
    `io_wait_share`: idle while a disk was awaited. `clock_share`: the clock at the end over its
    maximum. None: unknown.
    """

    others_share: float
    stolen_share: float = 0.0
    waited_share: float | None = None
    io_wait_share: float = 0.0
    clock_share: float | None = None

    @property
    def taken_share(self) -> float:
        """The share that was taken and missed: others may use cores that were not needed."""
        missed = self.others_share if self.waited_share is None else self.waited_share
        return min(1.0, self.stolen_share + min(self.others_share, missed))

    @property
    def is_busy(self) -> bool:
        """Whether figures measured under this load say little about the measured program."""
        return self.taken_share > BUSY_SHARE


class RunTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One measured run: the target, the load, and the traces of requests and steps."""

    target: str
    workload: str
    arrivals: str
    seed: int
    started_unix_s: float
    duration_s: float
    requests: tuple[RequestTrace, ...]
    steps: tuple[StepStat, ...] = ()
    info: EngineInfo | None = None
    client_cpu_share: float | None = None
    send_lag_p99_s: float | None = None
    machine_load: MachineLoad | None = None
