"""When a sequence ends, and how its next token is sampled.

Stop *strings* are not handled here: only text shows them, so the engine detects them and calls
`Scheduler.finish`.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from ridgeline.engine.scheduler.beam_search import BeamState
from ridgeline.engine.scheduler.plan import SamplePoint, token_rules
from ridgeline.engine.scheduler.sequence import Sequence
from ridgeline.records import FinishReason, Request

Stop = tuple[FinishReason, int | None]


def derive_seed(base: int, index: int) -> int:
    """A 63-bit seed derived from both numbers: of a request's choice, or of an engine's request."""
    digest = blake2b(f"{base}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class StopRule:
    """Applies the model's end-of-sequence tokens and its maximum sequence length."""

    def __init__(self, eos_token_ids: Iterable[int], max_model_len: int) -> None:
        self._eos, self._max_model_len = tuple(eos_token_ids), max_model_len

    def check_stop(self, seq: Sequence) -> Stop | None:
        """(finish reason, stop reason) if the sequence ends with its last token, else None."""
        sampling, num_known = seq.sampling, len(seq.tokens)
        num_output = num_known - seq.num_prompt
        if num_output > sampling.min_tokens:
            token = seq.tokens[-1]
            if token in self._eos and not sampling.ignore_eos:
                return "stop", None
            if token in sampling.stop_token_ids:
                return "stop", token
        if num_output == sampling.max_tokens or num_known >= self._max_model_len:
            return "length", None
        return None

    def new_beams(self, request: Request) -> BeamState | None:
        """The state of a request's beam search; None without one."""
        params, sampling = request.sampling.beam, request.sampling
        if params is None:
            return None
        room = self._max_model_len - len(request.prompt)
        max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        eos = () if sampling.ignore_eos else self._eos
        stops = sampling.stop_token_ids
        return BeamState(params, sampling.n, max_tokens, eos, stops, sampling.logprobs)

    def max_useful_drafts(self, seq: Sequence) -> int:
        """How many drafts, and a token after them, could be accepted before the sequence ends."""
        wanted = seq.sampling.max_tokens
        room = self._max_model_len - seq.num_known
        return (room if wanted is None else min(wanted - seq.num_output, room)) - 1

    def sample_point(self, seq: Sequence) -> SamplePoint:
        """How to sample the sequence's next token."""
        sampling, num_prompt = seq.sampling, seq.num_prompt
        num_output = len(seq.tokens) - num_prompt
        history = tuple(seq.tokens) if seq.has_history else ()
        banned: tuple[int, ...] = ()
        if num_output < sampling.min_tokens:
            eos = () if sampling.ignore_eos else self._eos
            banned = tuple(dict.fromkeys((*eos, *sampling.stop_token_ids)))
        is_argmax = seq.is_argmax and not banned
        if seq.group.beams is not None:
            sampling = msgspec.structs.replace(sampling, logprobs=seq.group.beams.num_top)
        point = SamplePoint(sampling, seq.seed, num_output, num_prompt, history, banned, is_argmax)
        if seq.has_token_rules:
            rules = token_rules(sampling, history[num_prompt:])
            return msgspec.structs.replace(point, **rules)
        return point
