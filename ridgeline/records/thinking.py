"""Limits of a model's thinking: the texts that mark it, and a budget in tokens."""

from __future__ import annotations

import msgspec

from ridgeline.errors import BadInput


class ReasoningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Marks of a model's thinking, with the keys of vLLM's `--reasoning-config`."""

    reasoning_start_str: str | None = None
    reasoning_end_str: str | None = None


class ThinkingMarks(msgspec.Struct, frozen=True):
    """The texts around a model's thinking.

    `forced_end` is what the output continues with when the budget is spent; it has to end the
    thinking, so it contains `end`. `is_open`: the output begins inside the thinking, although the
    prompt shows no `start`.
    """

    start: str = "<think>"
    end: str = "</think>"
    forced_end: str = "</think>"
    is_open: bool = False

    def __post_init__(self) -> None:
        if not self.start or not self.end:
            raise BadInput(
                "a mark of the thinking is empty", fix='name both, such as "<think>" and "</think>"'
            )
        if self.end not in self.forced_end:
            raise BadInput(
                "the forced end does not end the thinking",
                value=self.forced_end,
                limit=f"a text with {self.end!r} in it",
            )


class ThinkingLimit(msgspec.Struct, frozen=True):
    """A thinking budget in the tokens of one model, for one prompt.

    `num_open`: thinking tokens in the prompt, if it ends inside the thinking; None if it does not.
    They count in the budget of `num_tokens`.
    """

    num_tokens: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    forced_end: tuple[int, ...]
    num_open: int | None = None
