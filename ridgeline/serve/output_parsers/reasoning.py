"""`<think>…</think>` before the answer: DeepSeek-R1, Qwen 3 and relatives.

The prompt decides whether the output begins inside: a chat template may open the reasoning, or
close it at once where the request turns thinking off. Where the prompt shows neither, it begins
inside with `think_open`, unless thinking is off, and outside with `think`. Only the beginning of
the output counts: later tags are text.
"""

from __future__ import annotations

from enum import Enum

from ridgeline.serve.output_parsers.base import (
    OutputParser,
    OutputPart,
    Reasoning,
    partial_marker_length,
)

OPEN, CLOSE = MARKS = ("<think>", "</think>")


class _Stage(Enum):
    START = "start"
    REASONING = "reasoning"
    ANSWER = "answer"


class ReasoningParser:
    """Reasoning, then whatever `answer_parser` reads. `keep=False` drops the reasoning."""

    def __init__(self, answer_parser: OutputParser, *, inside: bool, keep: bool = True) -> None:
        self._answer_parser, self._inside, self._keep = answer_parser, inside, keep
        self._stage, self._held = _Stage.START, ""
        self._trims = True  # newlines at the start of reasoning and answer belong to the format

    def feed(self, text: str) -> list[OutputPart]:
        if self._stage is _Stage.ANSWER:
            return self._feed_answer(text)
        self._held += text
        if self._stage is _Stage.START and not self._decide_stage():
            return []
        if self._stage is _Stage.REASONING:
            return self._feed_reasoning()
        return self._feed_answer(self._take_held())

    def finish(self) -> list[OutputPart]:
        held = self._take_held()
        is_reasoning = self._stage is _Stage.REASONING
        if is_reasoning or (self._stage is _Stage.START and self._inside):
            return self._reasoning(held) + self._answer_parser.finish()
        return self._feed_answer(held) + self._answer_parser.finish()

    def _decide_stage(self) -> bool:
        """Whether enough text has come to know how the output begins."""
        head = self._held.lstrip()
        if OPEN.startswith(head):
            self._stage = _Stage.REASONING if head == OPEN else _Stage.START
        else:
            is_opened = head.startswith(OPEN)
            self._stage = _Stage.REASONING if is_opened or self._inside else _Stage.ANSWER
            self._trims = self._stage is _Stage.REASONING
        if self._stage is _Stage.REASONING:
            self._held = head.removeprefix(OPEN)
        return self._stage is not _Stage.START

    def _feed_reasoning(self) -> list[OutputPart]:
        before, is_closed, after = self._held.partition(CLOSE)
        if is_closed:
            self._held, self._stage = "", _Stage.ANSWER
            parts = self._reasoning(before)
            self._trims = True
            return parts + self._feed_answer(after)
        cut = len(self._held) - partial_marker_length(self._held, [CLOSE])
        text, self._held = self._held[:cut], self._held[cut:]
        return self._reasoning(text)

    def _reasoning(self, text: str) -> list[OutputPart]:
        text = self._trim(text)
        return [Reasoning(text)] if text and self._keep else []

    def _feed_answer(self, text: str) -> list[OutputPart]:
        text = self._trim(text)
        return self._answer_parser.feed(text) if text else []

    def _trim(self, text: str) -> str:
        if self._trims:
            text = text.lstrip("\n")
            self._trims = not text
        return text

    def _take_held(self) -> str:
        text, self._held = self._held, ""
        return text


def begins_in_reasoning(prompt_tail: str, default: bool) -> bool:
    """Whether an output begins inside the reasoning; `default` where the prompt does not tell.

    `prompt_tail`: the end of the rendered prompt, special tokens included.
    """
    tail = prompt_tail.rstrip()
    return tail.endswith(OPEN) or (default and not tail.endswith(CLOSE))


def is_reasoning_closed(prompt_tail: str) -> bool:
    """Whether a rendered prompt ends behind the reasoning, so that only the answer is left."""
    return prompt_tail.rstrip().endswith(CLOSE)


def is_reasoning_open(text: str) -> bool | None:
    """Whether an answer that is to be continued ends inside its reasoning; None without marks."""
    if OPEN not in text and CLOSE not in text:
        return None
    return text.rfind(OPEN) > text.rfind(CLOSE)
