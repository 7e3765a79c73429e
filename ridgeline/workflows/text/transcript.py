"""What was said in a conversation, and how fast the replies came.

No engine is needed to read it.
"""

from __future__ import annotations

from html import escape
from typing import Literal

import msgspec

from ridgeline.records import FinishReason, Usage
from ridgeline.report.html import render_page
from ridgeline.report.result import Result

MIN_GAPS = 7  # between tokens, for a speed


class Reply(Result, frozen=True, kw_only=True):
    """One answer, complete or as far as it was received, and how fast it came.

    `finish_reason` is None while the answer is incomplete, "abort" if its stream was closed.
    `ttft_s`: seconds from the request to the first token, None before it. `decode_s`: seconds from
    the first token to the latest.
    """

    text: str
    finish_reason: FinishReason | None
    usage: Usage
    ttft_s: float | None
    decode_s: float

    def __str__(self) -> str:
        return self.text

    @property
    def tokens_per_s(self) -> float | None:
        """Speed of decoding, without the first token; None for an answer too short to tell.

        The tokens of a short answer may arrive in one piece, as if they had taken no time.
        """
        num_gaps = self.usage.completion_tokens - 1
        if num_gaps < MIN_GAPS or self.decode_s <= 0:
            return None
        return num_gaps / self.decode_s

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


class Turn(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Transcript(Result, frozen=True, kw_only=True):
    """The turns of a conversation, and the figures of the model's replies."""

    model: str
    turns: tuple[Turn, ...]
    replies: tuple[Reply, ...]

    def to_html(self) -> str:
        """The conversation as a page."""
        return render_page(
            "report/record.html",
            title=f"Ridgeline: conversation with {self.model}",
            eyebrow="Ridgeline",
            heading=f"Conversation with {self.model}",
            lede="",
            text="\n\n".join(f"{turn.role}: {turn.content}" for turn in self.turns),
        )
