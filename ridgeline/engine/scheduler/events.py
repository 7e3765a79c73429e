"""Builds the events emitted for a sequence."""

from __future__ import annotations

from typing import Any

from ridgeline.engine.scheduler.plan import RunOutput
from ridgeline.engine.scheduler.sequence import Sequence, SequenceGroup
from ridgeline.records import Event, Finished, FinishReason, Token


def token_event(seq: Sequence, output: RunOutput, i: int, at_s: float) -> Token:
    """The i-th token of `output`. The first event of choice 0 carries the prompt's logprobs."""
    return Token(
        request_id=seq.request.id,
        index=seq.index,
        token=output.tokens[i],
        text="",
        at_s=at_s,
        logprobs=output.logprobs[i] if output.logprobs else None,
        prompt_logprobs=None if seq.num_prompt_logprobs is None else seq.take_prompt_logprobs(),
    )


def finished_event(
    seq: Sequence, reason: FinishReason, stop_reason: str | int | None, at_s: float
) -> Finished:
    """The end of one choice."""
    return Finished(
        request_id=seq.request.id,
        index=seq.index,
        reason=reason,
        at_s=at_s,
        usage=seq.usage(),
        stop_reason=stop_reason,
    )


def beam_events(group: SequenceGroup, at_s: float) -> list[Event]:
    """The outputs of a beam search that is over, best first."""
    assert group.beams is not None
    events: list[Event] = []
    for index, output in enumerate(group.beams.finished):
        own: dict[str, Any] = {"request_id": group.request.id, "index": index, "at_s": at_s}
        logprobs = output.logprobs or (None,) * len(output.tokens)
        events += [
            Token(token=token, text="", logprobs=values, **own)
            for token, values in zip(output.tokens, logprobs, strict=True)
        ]
        usage = group.usage(len(output.tokens))
        reason, stop_reason = output.reason, output.stop_reason
        events.append(Finished(reason=reason, stop_reason=stop_reason, usage=usage, **own))
    for index in range(len(group.beams.finished), group.beams.width):  # of a tiny vocabulary
        own = {"request_id": group.request.id, "index": index, "at_s": at_s}
        events.append(Finished(reason="length", usage=group.usage(0), **own))
    return events


def aborted_events(group: SequenceGroup, at_s: float) -> list[Event]:
    """The end of every unfinished choice by index, including those not forked yet.

    A beam search has no output before its end.
    """
    usages = dict.fromkeys(group.unforked, group.usage(0))
    if group.beams is None:
        usages |= {index: seq.usage() for index, seq in group.live.items()}
    else:
        usages = dict.fromkeys(range(group.beams.width), group.usage(0))
    return [
        Finished(
            request_id=group.request.id,
            index=index,
            reason="abort",
            at_s=at_s,
            usage=usage,
        )
        for index, usage in sorted(usages.items())
    ]
