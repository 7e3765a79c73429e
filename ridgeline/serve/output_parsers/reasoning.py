"""`<think>…</think>` before the answer: DeepSeek-R1, Qwen 3 and their kin.

`think`: the model opens its reasoning itself. `think_open`: the chat template has opened it in the
prompt, so that the answer begins inside. Only the beginning of an answer is looked at: the same
markers later on are text.
"""

from __future__ import annotations

from enum import Enum

from ridgeline.serve.output_parsers.base import Part, Reader, Reasoning, held_back

OPEN, CLOSE = "<think>", "</think>"


class _At(Enum):
    START = "start"
    REASONING = "reasoning"
    ANSWER = "answer"


class ReasoningFirst:
    """Reasoning, then whatever `then` reads. `keep` False drops the reasoning."""

    def __init__(self, then: Reader, *, inside: bool, keep: bool = True) -> None:
        self._then, self._inside, self._keep = then, inside, keep
        self._at, self._held = _At.START, ""
        self._trim = True  # newlines at the beginning of reasoning and answer are the format's

    def feed(self, text: str) -> list[Part]:
        if self._at is _At.ANSWER:
            return self._answer(text)
        self._held += text
        if self._at is _At.START and not self._begin():
            return []
        return self._reason() if self._at is _At.REASONING else self._answer(self._take())

    def end(self) -> list[Part]:
        held = self._take()
        if self._at is _At.REASONING or (self._at is _At.START and self._inside):
            return self._emit(held) + self._then.end()
        return self._answer(held) + self._then.end()

    def _begin(self) -> bool:
        """Whether it is known by now how the answer begins."""
        head = self._held.lstrip()
        if OPEN.startswith(head):
            self._at = _At.REASONING if head == OPEN else _At.START
        else:
            opened = head.startswith(OPEN)
            self._at = _At.REASONING if opened or self._inside else _At.ANSWER
            self._trim = self._at is _At.REASONING
        if self._at is _At.REASONING:
            self._held = head.removeprefix(OPEN)
        return self._at is not _At.START

    def _reason(self) -> list[Part]:
        before, closed, after = self._held.partition(CLOSE)
        if closed:
            self._held, self._at = "", _At.ANSWER
            parts = self._emit(before)
            self._trim = True
            return parts + self._answer(after)
        sure = len(self._held) - held_back(self._held, [CLOSE])
        text, self._held = self._held[:sure], self._held[sure:]
        return self._emit(text)

    def _emit(self, text: str) -> list[Part]:
        text = self._trimmed(text)
        return [Reasoning(text)] if text and self._keep else []

    def _answer(self, text: str) -> list[Part]:
        text = self._trimmed(text)
        return self._then.feed(text) if text else []

    def _trimmed(self, text: str) -> str:
        if self._trim:
            text = text.lstrip("\n")
            self._trim = not text
        return text

    def _take(self) -> str:
        text, self._held = self._held, ""
        return text
