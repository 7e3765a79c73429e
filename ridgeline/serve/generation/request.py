"""What one HTTP request asks the engine to generate, whatever its endpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from ridgeline.records import CachePolicy, KvTransferParams, Sampling, Slo
from ridgeline.serve.generation.handover import Handover
from ridgeline.serve.generation.resume import ResumePoint, TokenLog

if TYPE_CHECKING:
    from ridgeline.similarity import Vector


class TokenPrompt(msgspec.Struct, frozen=True):
    """One prompt: its token ids, and the text they were tokenised from, if any.

    `num_charged`: tokens that were charged to the key before the text was tokenised.
    """

    tokens: tuple[int, ...]
    text: str | None = None
    num_charged: int = 0


class ComparedMessage(msgspec.Struct, frozen=True):
    """The message by which an answer may be looked up. `rest`: the request without it, encoded."""

    text: str
    rest: bytes


class Question(msgspec.Struct, frozen=True):
    """A message by its meaning. `rest`: the request without it, encoded; `vector` [D]: its
    embedding, centred and at length 1."""

    rest: bytes
    vector: Vector


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a request that concern its service and not its output, as the client sent them.

    `ignored`: names of fields that have no effect. `prediction`: the output that the client
    expects, in tokens. `scoring_field`: the field that asked for log-probabilities of the prompt.
    `grammar_field`: the one that asked for structured output. `model`: the served model or an
    adapter. `cache`: what the prefix cache keeps. `question`: what an answer is looked up by, if
    similar ones will do. `headers` go with the response. `must_compute`: no stored answer will do.
    """

    priority: int | None = None
    cache_salt: str | None = None
    slo_class: str | None = None
    timeout_ms: float | None = None
    request_id: str | None = None
    ignored: tuple[str, ...] = ()
    prediction: tuple[int, ...] = ()
    scoring_field: str = "prompt_logprobs"
    model: str | None = None
    cache: CachePolicy | None = None
    question: Question | None = None
    grammar_field: str | None = None
    headers: Mapping[str, str] = {}
    must_compute: bool = False


class SchedulingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine schedules a request. `tenant` salts the prefix cache; `slo` is the objective
    of the class `slo_class`; waiting `account`s are served in proportion to their `share`s."""

    priority: int = 0
    tenant: str = ""
    timeout_s: float | None = None
    slo_class: str = ""
    slo: Slo | None = None
    account: str = ""
    share: float = 1.0


def charge_nothing(_num_tokens: int) -> None:
    """For callers whose tokens are not limited."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated and admitted request: one engine request per prompt.

    `score_only`: the client wants log-probabilities of its prompt; the one token that the engine
    has to sample for them is not part of the response. `charge` is called with the number of output
    tokens of each step. `headers` go with the response. `seed` is that of a request without one
    which another server may have to continue, `resume` where that one broke off; `log` gets every
    token that is new. `prediction`: the output that the client expects. `adapter`: the name of an
    adapter. `cache`: what the prefix cache keeps. `grammar_field`: the field that asks for
    structured output. `kv_source`: the server that has computed the prompt; `handover`: this one
    computes it for another one.
    """

    id: str
    created: int = 0
    prompts: Sequence[TokenPrompt]
    sampling: Sampling
    scheduling: SchedulingParams = SchedulingParams()
    score_only: bool = False
    charge: Callable[[int], None] = charge_nothing
    headers: Mapping[str, str] = {}
    is_resumable: bool = False
    seed: int | None = None
    resume: ResumePoint | None = None
    log: TokenLog | None = None
    prediction: tuple[int, ...] = ()
    adapter: str = ""
    cache: CachePolicy | None = None
    grammar_field: str | None = None
    kv_source: KvTransferParams | None = None
    handover: Handover | None = None

    def sampling_of(self, prompt: int) -> Sampling:
        """The sampling of one prompt: with the seed that was drawn for the request."""
        if self.seed is None or self.sampling.seed is not None:
            return self.sampling
        return msgspec.structs.replace(self.sampling, seed=self.seed + prompt)

    def resumed_tokens(self, prompt: int) -> tuple[tuple[int, ...], ...]:
        """Tokens of the choices of one prompt that were sent before."""
        n = self.sampling.n
        return () if self.resume is None else self.resume.tokens[prompt * n : (prompt + 1) * n]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.sampling.n
