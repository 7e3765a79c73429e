"""Stored answers by the exact request: model, tenant, prompt tokens and every sampling parameter.

Only requests whose answer is determined are stored: greedy ones, and those with a seed. An answer
is the events of its request, encoded, so its size is known exactly. It is dropped when its time to
live is over, or least recently used first when the bound is reached; one tenant holds at most half
of the bound. With an index, a similar question gets the answer, too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec

from ridgeline.records import Event, Failed, Finished, Started, Token
from ridgeline.serve.generation.request import GenerationRequest
from ridgeline.serve.response_cache.semantic import ScopedVector, SemanticIndex
from ridgeline.similarity import SimilarityThreshold

TENANT_SHARE = 0.5
"""Of the bound, what the answers of one tenant may take."""

_DECODER = msgspec.msgpack.Decoder(list[Started | Token | Finished])


def response_key(request: GenerationRequest, model: str) -> bytes | None:
    """The key of a request's answer; None where the answer is not determined by the request.

    Answers of adapters are not stored: another one may be loaded under the same name.
    """
    sampling = request.sampling
    policy = request.cache
    no_store = policy is not None and policy.max_cached_tokens == 0
    if no_store or request.adapter or request.resume is not None:
        return None
    if sampling.greedy:
        sampling = msgspec.structs.replace(sampling, seed=None)
    elif sampling.seed is None:
        return None
    prompts = [prompt.tokens for prompt in request.prompts]
    fields = (model, request.scheduling.tenant, prompts, request.score_only, sampling)
    return blake2b(msgspec.msgpack.encode(fields), digest_size=32).digest()


class StoredAnswer(msgspec.Struct, frozen=True):
    """The encoded events of each prompt, in order, and when they were stored."""

    tenant: str
    events: tuple[bytes, ...]
    stored_s: float
    num_index_bytes: int = 0

    @property
    def nbytes(self) -> int:
        # and what an entry takes besides
        return sum(map(len, self.events)) + self.num_index_bytes + 256

    def events_of(self, prompt: int) -> list[Started | Token | Finished]:
        """The events of one prompt's choices."""
        return _DECODER.decode(self.events[prompt])


class FoundAnswer(msgspec.Struct, frozen=True):
    """An answer to the same request; with a `similarity`, to a similar one."""

    answer: StoredAnswer
    similarity: float | None = None


class ResponseCache:
    """At most `max_bytes` of answers, each for `ttl_s` seconds of `now`.

    `index`: finds answers to similar questions, too.
    """

    def __init__(
        self,
        max_bytes: int,
        ttl_s: float,
        now: Callable[[], float],
        index: SemanticIndex | None = None,
    ) -> None:
        self.max_bytes, self.num_bytes, self.index = max_bytes, 0, index
        self.num_hits = self.num_semantic_hits = self.num_misses = 0
        self._ttl_s, self._now = ttl_s, now
        self._answers: OrderedDict[bytes, StoredAnswer] = OrderedDict()
        self._by_tenant: Counter[str] = Counter()  # bytes

    @property
    def calibration(self) -> SimilarityThreshold | None:
        """Of the index; None without one."""
        return None if self.index is None else self.index.calibration

    def __len__(self) -> int:
        return len(self._answers)

    def __contains__(self, key: bytes) -> bool:
        answer = self._answers.get(key)
        if answer is not None and self._now() - answer.stored_s > self._ttl_s:
            self._drop(key)
            return False
        return answer is not None

    def find(self, key: bytes, place: ScopedVector | None = None) -> FoundAnswer | None:
        """The answer to a request, or to a similar one at its `place`; None if there is none, or
        its time is over."""
        if key in self:
            self.num_hits += 1
            self._answers.move_to_end(key)
            return FoundAnswer(self._answers[key])
        while self.index is not None and place is not None:
            if (nearest := self.index.nearest(place)) is None:
                break
            similar, similarity = nearest
            if similar in self:
                self.num_semantic_hits += 1
                self._answers.move_to_end(similar)
                return FoundAnswer(self._answers[similar], similarity)
        self.num_misses += 1
        return None

    def store(
        self,
        key: bytes,
        tenant: str,
        events: Sequence[Sequence[Event]],
        place: ScopedVector | None = None,
    ) -> None:
        """Keep the events of a request that ended well, by prompt; `place`: of similar ones."""
        kept = tuple(
            msgspec.msgpack.encode([e for e in own if isinstance(e, Started | Token | Finished)])
            for own in events
        )
        num_index_bytes = 0 if place is None else place.nbytes
        answer = StoredAnswer(tenant, kept, self._now(), num_index_bytes)
        share = int(self.max_bytes * TENANT_SHARE)
        if answer.nbytes > share:
            return
        if key in self._answers:
            self._drop(key)
        while self._by_tenant[tenant] + answer.nbytes > share:
            self._drop(next(k for k, a in self._answers.items() if a.tenant == tenant))
        while self.num_bytes + answer.nbytes > self.max_bytes:
            self._drop(next(iter(self._answers)))
        self._answers[key] = answer
        self._by_tenant[tenant] += answer.nbytes
        self.num_bytes += answer.nbytes
        if self.index is not None and place is not None:
            self.index.add(key, place)

    def forget(self, tenant: str) -> None:
        """Drop every answer of a tenant."""
        for key in [key for key, answer in self._answers.items() if answer.tenant == tenant]:
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        answer = self._answers.pop(key)
        if self.index is not None:
            self.index.drop(key)
        self.num_bytes -= answer.nbytes
        self._by_tenant[answer.tenant] -= answer.nbytes
        if not self._by_tenant[answer.tenant]:
            del self._by_tenant[answer.tenant]


def is_whole(events: Sequence[Event], num_choices: int) -> bool:
    """Whether every choice has ended by itself."""
    ends = [event for event in events if isinstance(event, Finished)]
    failed = any(isinstance(event, Failed) for event in events)
    return not failed and len(ends) == num_choices and all(end.reason != "abort" for end in ends)
