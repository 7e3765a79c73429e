"""What one streamed chunk of an OpenAI-compatible server means: which carry tokens, and how many.

Servers disagree, and most published errors in TTFT and ITL come from here. The rules:

- Text (content, reasoning, reasoning_content, a completion's text, tool-call arguments) is output.
- `delta: {role, content: ""}` is metadata: it does not stop the TTFT clock.
- An empty text without a role is a token that decodes to nothing (half a UTF-8 character) …
- … except beside a finish_reason, where it may be either: it counts only if the server's own count
  says that exactly so many tokens are missing (more are missing where chunks hold several).
- A chunk without choices carries usage only and never moves the end of the output.
- How many tokens a chunk holds: its token_ids or logprobs tell exactly; else the growth of a
  running usage count; else one, and the rest of the server's final count is spread over the
  chunks by the length of their text (largest remainder), so that the total is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class Logprobs(msgspec.Struct, frozen=True):
    """`content` in chat chunks, `tokens` in completion chunks: one entry per token."""

    content: list[Any] | None = None
    tokens: list[Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.content or self.tokens or ())


class ToolFunction(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, frozen=True):
    function: ToolFunction | None = None


class Delta(msgspec.Struct, frozen=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def text(self) -> str:
        calls = (call.function for call in self.tool_calls or ())
        said = [part for f in calls if f is not None for part in (f.name, f.arguments)]
        parts = [self.reasoning or self.reasoning_content, self.content, *said]
        return "".join(part for part in parts if part)

    @property
    def empty_token(self) -> bool:
        """An empty text that nothing marks as metadata."""
        texts = (self.content, self.reasoning, self.reasoning_content)
        return self.role is None and any(text is not None for text in texts)


class Choice(msgspec.Struct, frozen=True):
    """`message` in place of `delta`: a chat answer that was not streamed."""

    index: int = 0
    delta: Delta | None = None
    message: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0


class Chunk(msgspec.Struct, frozen=True):
    """One data line. `error` is whatever a server sends in place of choices when it fails.

    `metrics` (vLLM, Ridgeline: --enable-per-request-metrics) and `timings` (llama.cpp) are what a
    server says of this request; they are looked at, never relied on.
    """

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None
    metrics: Any = None
    timings: Any = None

    @property
    def prefill_s(self) -> float | None:
        """From the request's first share of a step to its first token, by the server's word."""
        for told, name in (
            (self.metrics, "time_to_first_token_ms"),
            (self.timings, "prompt_ms"),
        ):
            value = told.get(name) if isinstance(told, dict) else None
            if isinstance(value, int | float) and value >= 0:
                return value / 1000
        return None


_DECODER = msgspec.json.Decoder(Chunk)


def decode_chunk(data: bytes) -> Chunk:
    """Parse one data line; msgspec.DecodeError where it is not a chunk."""
    return _DECODER.decode(data)


def error_of(chunk: Chunk) -> str | None:
    """The failure that a chunk reports, in the server's words."""
    if isinstance(chunk.error, dict) and isinstance(chunk.error.get("message"), str):
        return str(chunk.error["message"])
    if chunk.error is not None:
        return chunk.error if isinstance(chunk.error, str) else repr(chunk.error)
    return chunk.message or "the server reported an error" if chunk.object == "error" else None


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Output-bearing chunk as seen: `count` None where the chunk did not tell, `doubtful` if
    maybe empty.
    """

    at_s: float
    text: str
    count: int | None = None
    doubtful: bool = False


def piece_of(choice: Choice, at_s: float) -> Piece | None:
    """The output that a choice carries, or None where it is metadata."""
    told = len(choice.token_ids or ()) or (choice.logprobs.num_tokens if choice.logprobs else 0)
    text, empty_token = _said(choice)
    if not (text or told or empty_token):
        return None
    doubtful = not text and not told and choice.finish_reason is not None
    return Piece(at_s=at_s, text=text, count=told or None, doubtful=doubtful)


def _said(choice: Choice) -> tuple[str, bool]:
    said = choice.delta or choice.message
    if said is not None:
        return said.text, said.empty_token
    return choice.text or "", choice.text is not None


def counted(pieces: Sequence[Piece], total: int | None) -> list[tuple[float, int]]:
    """(instant, tokens) of each output-bearing chunk, adding up to the server's `total` where it
    told one.
    """
    sure = [piece for piece in pieces if not piece.doubtful]
    if total is None:
        return [(piece.at_s, piece.count or 1) for piece in sure]
    missing = total - sum(piece.count or 1 for piece in sure)
    some_silent = any(piece.count is None for piece in sure)
    if missing == len(pieces) - len(sure) or (missing > 0 and not some_silent):
        sure = list(pieces)  # the doubtful chunks were they, or nobody else can have been
    counts = [piece.count or 1 for piece in sure]
    surplus = total - sum(counts)
    if surplus > 0:
        silent = [i for i, piece in enumerate(sure) if piece.count is None]
        for i, extra in zip(silent, _spread(surplus, [sure[i] for i in silent]), strict=True):
            counts[i] += extra
    elif surplus < 0:
        _take_back(-surplus, sure, counts)
    return [(piece.at_s, count) for piece, count in zip(sure, counts, strict=True) if count]


def _spread(surplus: int, pieces: Sequence[Piece]) -> list[int]:
    """Whole shares of `surplus` in proportion to text length, by largest remainder."""
    if not pieces:
        return []
    weights = [len(piece.text.encode()) for piece in pieces]
    if not any(weights):
        weights = [1] * len(pieces)
    exact = [surplus * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: surplus - sum(shares)]:
        shares[i] += 1
    return shares


def _take_back(excess: int, pieces: Sequence[Piece], counts: list[int]) -> None:
    """More chunks than tokens: empty ones were keep-alives after all, then the last ones were
    tails.
    """
    empty_first = sorted(range(len(pieces)), key=lambda i: (bool(pieces[i].text), -i))
    for i in empty_first:
        taken = min(excess, counts[i])
        counts[i] -= taken
        excess -= taken
