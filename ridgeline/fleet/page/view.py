"""A fleet as its gateway sees it: backends, load, and counters."""

from __future__ import annotations

import msgspec


class BackendView(msgspec.Struct, frozen=True, kw_only=True):
    """One backend. `prefill_tok_s`: prompt tokens per second, as measured here; 0 if unknown.
    `oldest_s`: how long a request has waited for the first byte of its response. `batch_servers`:
    servers that the open requests of its batch store, `batch_store`, need to end in time."""

    url: str
    state: str
    arm: str
    models: tuple[str, ...]
    in_flight: int
    queued_tokens: int
    prefill_tok_s: float
    oldest_s: float = 0.0
    batch_store: str = ""
    batch_servers: float = 0.0


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet now. `counts`: totals since the gateway's start, by the names of its counters.
    `canary`: the state of the rollout, "" without one."""

    backends: tuple[BackendView, ...]
    models: tuple[str, ...]
    num_parked: int
    num_suspects: int
    oldest_s: float
    wanted_replicas: int
    counts: dict[str, int]
    canary: str = ""
    canary_reasons: tuple[str, ...] = ()
