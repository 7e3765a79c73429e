"""The contract of a routing policy, and what it knows of the load of each replica.

Invariants
- `choose` returns an id of `active`, which is not empty, and changes no load.
- A policy has bounded memory: a router runs for months.
- No policy reads a clock or draws an unseeded number: instants and seeds are arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_DECAY = 0.95  # of the measurements of prefill, per first token


class RoutedRequest(Protocol):
    """What a policy may read of a request.

    `prefix` holds ids of the prompt's leading blocks of `prefix_block` tokens: equal ids at one
    depth stand for equal prefixes. `num_prompt` counts the tokens of the prompt, exactly or by
    estimate. `ttft_slo_s` is the time within which its first token is due, if there is one.
    """

    @property
    def prefix(self) -> tuple[int, ...]: ...

    @property
    def prefix_block(self) -> int: ...

    @property
    def num_prompt(self) -> int: ...

    @property
    def session(self) -> str: ...

    @property
    def ttft_slo_s(self) -> float | None: ...


class FleetLoad:
    """The load of every replica, by its id: what a router has sent it, and how fast it was.

    `in_flight`: requests that have not ended. `queued_tokens`: prompt tokens of requests whose
    first token has not come. `kv_usage`: share of KV blocks in use, as the replica last said.
    """

    def __init__(self) -> None:
        self.in_flight: list[int] = []
        self.queued_tokens: list[int] = []
        self.kv_usage: list[float] = []
        self._computed_tokens: list[float] = []
        self._computing_s: list[float] = []
        self._last_first_token_s: list[float] = []

    def add_replica(self) -> int:
        """The id of a new replica without load."""
        self.in_flight.append(0)
        self.queued_tokens.append(0)
        self.kv_usage.append(0.0)
        self._computed_tokens.append(0.0)
        self._computing_s.append(0.0)
        self._last_first_token_s.append(0.0)
        return len(self.in_flight) - 1

    def note_sent(self, replica: int, num_tokens: int) -> None:
        """A request with that many uncached prompt tokens was sent to the replica."""
        self.in_flight[replica] += 1
        self.queued_tokens[replica] += num_tokens

    def note_first_token(self, replica: int, num_tokens: int, sent_s: float, now_s: float) -> None:
        """Its first token came. The replica worked on it since it was sent, or since the first
        token before it."""
        self.queued_tokens[replica] -= num_tokens
        began_s = max(sent_s, self._last_first_token_s[replica])
        self._last_first_token_s[replica] = now_s
        if num_tokens:
            # weighted by length: a short prompt tells what a request costs, and not the rate
            tokens, seconds = self._computed_tokens, self._computing_s
            tokens[replica] = _DECAY * tokens[replica] + num_tokens * num_tokens
            seconds[replica] = _DECAY * seconds[replica] + num_tokens * (now_s - began_s)

    def note_lost(self, replica: int, num_tokens: int) -> None:
        """The request ended without a first token, or with its whole answer at once."""
        self.queued_tokens[replica] -= num_tokens

    def note_ended(self, replica: int) -> None:
        """The request ended, for whatever reason."""
        self.in_flight[replica] -= 1

    def clear(self, replica: int) -> None:
        """The replica lost everything that was sent to it."""
        self.in_flight[replica] = self.queued_tokens[replica] = 0

    def prefill_rate(self, replica: int) -> float:
        """Prompt tokens per second, measured; 0 if nothing was."""
        seconds = self._computing_s[replica]
        return self._computed_tokens[replica] / seconds if seconds > 0 else 0.0


class Router(Protocol):
    """Chooses a replica."""

    def choose(self, request: RoutedRequest, active: Sequence[int], load: FleetLoad) -> int: ...
