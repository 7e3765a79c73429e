"""The states of a rollout: shadow, then shares of the traffic, then promoted or rolled back.

shadow        the canary answers copies of requests; clients never see its answers
split         sessions are divided by hash, the canary's share grows from stage to stage
promoted      it gets requests like any other backend
rolled-back   it gets none, and the reasons are kept

A stage ends after enough sessions without a verdict against the canary. No clock here: the verdict
depends on observations and their order, not on instants.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from hashlib import blake2b
from typing import Literal

import msgspec

from ridgeline.errors import BadInput
from ridgeline.fleet.canary.evidence import Bets, EventEvidence, RankEvidence, RateEvidence

Arm = Literal["stable", "canary"]
RolloutState = Literal["shadow", "split", "promoted", "rolled-back"]
_MAX_SESSIONS = 100_000
_MAX_OTHERS = 19  # stable sessions that one canary session is ranked among
_MAX_WAITING = 256
_NAMES = {
    "errors": "more of its sessions have errors",
    "slo": "more of its sessions miss their SLO",
    "ttft": "its time to first token is longer",
    "pace": "its time per token is longer",
    "agreement": "its answers differ from the stable version's",
}


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`stages`: the canary's shares; `min_sessions` of it end a stage, `min_tokens` compared ones
    the shadow. `alpha`: the probability that a canary which is no worse is ever rolled back.
    `max_disagreement`: tokens that may differ, per token; `max_slowdown`: 0.02 allows 2 %."""

    stages: tuple[float, ...] = (0.05, 0.25, 0.5)
    min_sessions: int = 300
    min_tokens: int = 50_000
    alpha: float = 0.05
    max_disagreement: float = 0.0
    max_slowdown: float = 0.02

    def __post_init__(self) -> None:
        if not self.stages or not all(0 < share < 1 for share in self.stages):
            raise BadInput(
                "--canary-stages must be shares between 0 and 1",
                value=",".join(map(str, self.stages)),
                fix="write 0.05,0.25,0.5",
            )

    @property
    def log_needed(self) -> float:
        """The logarithm of the evidence of one test that rolls the canary back: all of them
        together are wrong with the probability `alpha`."""
        return -math.log(self.alpha / len(_NAMES))


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a request came to. `met_slo` is None without an SLO, `pace_s`, the time per token after
    the first, for an answer without a second one."""

    has_failed: bool
    met_slo: bool | None = None
    ttft_s: float | None = None
    pace_s: float | None = None


class RolloutRecord(msgspec.Struct, kw_only=True):
    """A rollout's state as it is kept in a file. `evidence`: base-10 logarithms, by test."""

    state: RolloutState = "shadow"
    stage: int = 0
    reasons: list[str] = []
    num_compared_tokens: int = 0
    num_sessions: int = 0
    evidence: dict[str, float] = {}


class Rollout:
    """Decides from observations of requests and of compared answers."""

    def __init__(self, config: RolloutConfig, record: RolloutRecord | None = None) -> None:
        first: RolloutState = "shadow" if config.min_tokens else "split"
        self.config, self.record = config, record or RolloutRecord(state=first)
        self._tests: dict[str, Bets] = {
            "errors": EventEvidence(),
            "slo": EventEvidence(),
            "ttft": RankEvidence(),
            "pace": RankEvidence(),
            "agreement": RateEvidence(config.max_disagreement),
        }
        self._changed: set[str] = set()
        self._seen: dict[str, OrderedDict[str, None]] = {
            name: OrderedDict() for name in ("session", *_NAMES)
        }
        self._ranks = {"ttft": _Ranks(config.max_slowdown), "pace": _Ranks(config.max_slowdown)}

    @property
    def state(self) -> RolloutState:
        return self.record.state

    @property
    def share(self) -> float:
        """The canary's share of the sessions now."""
        if self.state == "split":
            return self.config.stages[self.record.stage]
        return 0.0

    def arm_of(self, session: str) -> Arm:
        """Where a session belongs now. A session that the canary has keeps it as shares grow."""
        digest = blake2b(session.encode(), digest_size=8, person=b"canary").digest()
        place = int.from_bytes(digest, "little") / 2**64
        return "canary" if place < self.share else "stable"

    def note_comparison(self, num_tokens: int, num_differing: int) -> None:
        """An answer of the canary was compared with the stable one's, up to the first difference:
        beyond it, the two continue different texts."""
        if self.state not in ("shadow", "split"):
            return
        self.record.num_compared_tokens += num_tokens
        agreement = self._tests["agreement"]
        assert isinstance(agreement, RateEvidence)
        agreement.note(num_tokens, num_differing)
        self._changed.add("agreement")
        self._decide()

    def note_shadow_error(self, arm: Arm, session: str, copied: float) -> None:
        """In the shadow, a request has failed at the stable version, or a copy of one at the
        canary, which gets a share `copied`."""
        if self.state != "shadow" or not self._is_first("errors", f"{arm} {session}"):
            return
        errors = self._tests["errors"]
        assert isinstance(errors, EventEvidence)
        errors.note(arm == "canary", copied / (1 + copied))
        self._changed.add("errors")
        self._decide()

    def note_outcome(self, arm: Arm, session: str, outcome: Outcome) -> None:
        """A request of a session has ended."""
        if self.state != "split":
            return
        is_canary = arm == "canary"
        if is_canary and self._is_first("session", session):
            self.record.num_sessions += 1
        for name, is_bad in (("errors", outcome.has_failed), ("slo", outcome.met_slo is False)):
            if is_bad and self._is_first(name, session):
                test = self._tests[name]
                assert isinstance(test, EventEvidence)
                test.note(is_canary, self.share)
                self._changed.add(name)
        if not outcome.has_failed:
            self._note_times(is_canary, session, outcome)
        self._decide()

    def _note_times(self, is_canary: bool, session: str, outcome: Outcome) -> None:
        if outcome.ttft_s is not None and self._is_first("ttft", session):
            self._rank("ttft", is_canary, outcome.ttft_s)
        if outcome.pace_s is not None and self._is_first("pace", session):
            self._rank("pace", is_canary, outcome.pace_s)

    def _rank(self, name: str, is_canary: bool, seconds: float) -> None:
        test = self._tests[name]
        assert isinstance(test, RankEvidence)
        num_others = max(1, min(_MAX_OTHERS, round(1 / self.share) - 1))
        for rank in self._ranks[name].add(is_canary, seconds, num_others):
            test.note(rank, num_others)
            self._changed.add(name)

    def _is_first(self, name: str, session: str) -> bool:
        seen = self._seen[name]
        if session in seen:
            return False
        seen[session] = None
        if len(seen) > _MAX_SESSIONS:
            seen.popitem(last=False)
        return True

    def _decide(self) -> None:
        """Roll back on evidence, or go on once a stage is complete."""
        record, config = self.record, self.config
        needed = config.log_needed / math.log(10)
        for name in self._changed:
            record.evidence[name] = min(self._tests[name].log_evidence / math.log(10), 1e3)
        reasons = [_NAMES[name] for name in self._changed if record.evidence[name] >= needed]
        self._changed.clear()
        if reasons:
            record.state, record.reasons = "rolled-back", reasons
        elif self.state == "shadow" and record.num_compared_tokens >= config.min_tokens:
            record.state = "split"
        elif self.state == "split" and record.num_sessions >= config.min_sessions:
            record.num_sessions = 0
            record.stage += 1
            for ranks in self._ranks.values():
                ranks.clear()
            if record.stage == len(config.stages):
                record.state, record.stage = "promoted", record.stage - 1


class _Ranks:
    """Ranks the canary's values among as many of the stable version's, each used once."""

    def __init__(self, max_slowdown: float) -> None:
        self._factor = 1 + max_slowdown
        self._stable: deque[float] = deque(maxlen=_MAX_WAITING)
        self._canary: deque[float] = deque(maxlen=_MAX_WAITING)

    def add(self, is_canary: bool, seconds: float, num_others: int) -> list[float]:
        """The ranks that this value completes."""
        (self._canary if is_canary else self._stable).append(
            seconds / self._factor if is_canary else seconds
        )
        ranks = []
        while self._canary and len(self._stable) >= num_others:
            value = self._canary.popleft()
            others = [self._stable.popleft() for _ in range(num_others)]
            less, equal = sum(o < value for o in others), sum(o == value for o in others)
            ranks.append(less + equal / 2)
        return ranks

    def clear(self) -> None:
        self._stable.clear()
        self._canary.clear()
