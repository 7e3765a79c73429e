"""One script per peculiarity of real servers, each with the metrics that a client should measure.

Times are seconds after the request's arrival. Expected metrics are worked out by hand from
docs/concepts/measurements.md; `meets` refers to `ttft:150 tpot:25`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ridgeline.measure.mock.script import (
    ExpectedMetrics,
    Script,
    ScriptedPart,
    final_chunks,
    token_chunks,
)

_FOUR = (0.10, 0.12, 0.14, 0.16)
_PLAIN = ExpectedMetrics(
    outcome="ok",
    ttft_s=0.10,
    tpot_s=0.02,
    itl_s=(0.02, 0.02, 0.02),
    e2e_s=0.16,
    output_tokens=4,
    meets=True,
)
_LOST_AFTER_TWO = ExpectedMetrics(
    outcome="failed",
    ttft_s=0.10,
    tpot_s=0.02,
    itl_s=(0.02,),
    e2e_s=0.12,
    output_tokens=2,
    meets=False,
)
_NOTHING = ExpectedMetrics(
    outcome="failed", ttft_s=None, tpot_s=None, itl_s=(), e2e_s=None, output_tokens=0, meets=False
)


def _raw(at_s: float, data: bytes, num_tokens: int = 0) -> ScriptedPart:
    return ScriptedPart(at_s=at_s, kind="raw", raw=data, num_tokens=num_tokens)


def _ok(
    ttft_s: float, tpot_s: float | None, itl_s: tuple[float, ...], e2e_s: float
) -> ExpectedMetrics:
    """A complete answer with one more token than gaps that meets the SLO."""
    return ExpectedMetrics(
        outcome="ok",
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        itl_s=itl_s,
        e2e_s=e2e_s,
        output_tokens=len(itl_s) + 1,
        meets=True,
    )


_COMPLETE = (
    Script(
        name="plain",
        about="four tokens, 20 ms apart",
        parts=(*token_chunks(_FOUR), *final_chunks(0.16, 4)),
        truth=_PLAIN,
    ),
    Script(
        name="slow",
        about="the first token exceeds the SLO",
        parts=(*token_chunks((0.20, 0.22, 0.24)), *final_chunks(0.24, 3)),
        truth=ExpectedMetrics(
            outcome="ok",
            ttft_s=0.20,
            tpot_s=0.02,
            itl_s=(0.02, 0.02),
            e2e_s=0.24,
            output_tokens=3,
            meets=False,
        ),
    ),
    Script(
        name="one-token",
        about="a one-token answer has no TPOT; the usage chunk 200 ms later is no output",
        parts=(*token_chunks((0.10,)), *final_chunks(0.10, 1, usage_at_s=0.30)),
        truth=_ok(0.10, None, (), 0.10),
    ),
    Script(
        name="role-first",
        about="a role-only chunk at once does not stop the TTFT clock",
        parts=(ScriptedPart(at_s=0.01, kind="role"), *token_chunks(_FOUR), *final_chunks(0.16, 4)),
        truth=_PLAIN,
    ),
    Script(
        name="late-usage",
        about="the usage chunk comes 300 ms after the last token",
        parts=(*token_chunks(_FOUR), *final_chunks(0.16, 4, usage_at_s=0.46)),
        truth=_PLAIN,
    ),
    Script(
        name="late-finish",
        about="finish_reason alone, 100 ms after the last token",
        parts=(*token_chunks(_FOUR), *final_chunks(0.26, 4)),
        truth=_PLAIN,
    ),
    Script(
        name="three-per-chunk",
        about="speculative decoding: chunks of 1, 3 and 3 tokens; the usage has the total",
        parts=(*token_chunks((0.10,)), *token_chunks((0.13, 0.16), each=3), *final_chunks(0.16, 7)),
        truth=_ok(0.10, 0.01, (0.01,) * 6, 0.16),
    ),
    Script(
        name="three-at-first",
        about="the first chunk holds three tokens, with token ids",
        parts=(
            ScriptedPart(at_s=0.10, kind="text", text="abc", num_tokens=3, has_token_ids=True),
            ScriptedPart(at_s=0.13, kind="text", text="def", num_tokens=3, has_token_ids=True),
            *final_chunks(0.13, 6),
        ),
        truth=ExpectedMetrics(
            outcome="ok",
            ttft_s=0.10,
            tpot_s=0.01,
            itl_s=(0.01,) * 3,
            e2e_s=0.13,
            output_tokens=6,
            meets=True,
        ),
    ),
    Script(
        name="all-at-once",
        about="five tokens in one chunk: the pace is unknown, so there is no TPOT",
        parts=(*token_chunks((0.10,), each=5), *final_chunks(0.10, 5)),
        truth=ExpectedMetrics(
            outcome="ok",
            ttft_s=0.10,
            tpot_s=None,
            itl_s=(),
            e2e_s=0.10,
            output_tokens=5,
            meets=True,
        ),
    ),
    Script(
        name="running-usage",
        about="every chunk carries a running count (continuous usage)",
        parts=(
            ScriptedPart(at_s=0.10, kind="text", text="a", num_tokens=1, running_usage=1),
            ScriptedPart(at_s=0.13, kind="text", text="b", num_tokens=3, running_usage=4),
            ScriptedPart(at_s=0.16, kind="text", text="cdefghi", num_tokens=3, running_usage=7),
            *final_chunks(0.16, 7),
        ),
        truth=_ok(0.10, 0.01, (0.01,) * 6, 0.16),
    ),
    Script(
        name="empty-tokens",
        about="a token that decodes to nothing (half a character) is a token",
        parts=(
            *token_chunks((0.10,)),
            ScriptedPart(at_s=0.12, kind="text", text="", num_tokens=1),
            *token_chunks((0.14, 0.16)),
            *final_chunks(0.16, 4),
        ),
        truth=_PLAIN,
    ),
    Script(
        name="empty-last",
        about="the finish chunk's empty text is the last token: the usage says that one token is "
        "missing",
        parts=(
            *token_chunks((0.10, 0.12, 0.14)),
            ScriptedPart(at_s=0.16, kind="text", text="", num_tokens=1, finish="length"),
            ScriptedPart(at_s=0.16, kind="usage", num_tokens=4),
            ScriptedPart(at_s=0.16, kind="done"),
        ),
        truth=_PLAIN,
    ),
    Script(
        name="empty-finish",
        about="the finish chunk's empty text is not a token: the usage says that none is missing",
        parts=(
            *token_chunks(_FOUR),
            ScriptedPart(at_s=0.18, kind="text", text="", finish="length"),
            ScriptedPart(at_s=0.18, kind="usage", num_tokens=4),
            ScriptedPart(at_s=0.18, kind="done"),
        ),
        truth=_PLAIN,
    ),
    Script(
        name="reasoning",
        about="reasoning is output: the clock stops at its first token",
        parts=(
            ScriptedPart(at_s=0.01, kind="role"),
            ScriptedPart(at_s=0.10, kind="reasoning", text="hm ", num_tokens=1),
            ScriptedPart(at_s=0.12, kind="reasoning", text="so ", num_tokens=1, field="reasoning"),
            *token_chunks((0.14, 0.16)),
            *final_chunks(0.16, 4),
        ),
        truth=_PLAIN,
    ),
    Script(
        name="tool-call",
        about="the arguments of a tool call are output",
        parts=(
            *(ScriptedPart(at_s=at, kind="tool", text='{"a"', num_tokens=1) for at in _FOUR),
            *final_chunks(0.16, 4),
        ),
        truth=_PLAIN,
        chat_only=True,
    ),
    Script(
        name="no-usage",
        about="no usage chunk: the chunks are counted, and the run reports that",
        parts=(
            *token_chunks(_FOUR),
            ScriptedPart(at_s=0.16, kind="finish", finish="length"),
            ScriptedPart(at_s=0.16, kind="done"),
        ),
        truth=_PLAIN,
    ),
    Script(
        name="no-done",
        about="the stream ends after its finish_reason without [DONE]",
        parts=(*token_chunks(_FOUR), ScriptedPart(at_s=0.16, kind="finish", finish="stop")),
        truth=_PLAIN,
    ),
    Script(
        name="line-separators",
        about="U+2028, U+2029 and U+0085 inside a JSON string are not line ends",
        parts=(*token_chunks(_FOUR, text="a\u2028\u2029\x85b"), *final_chunks(0.16, 4)),
        truth=_PLAIN,
    ),
    Script(
        name="split-reads",
        about="every event in five writes, split inside characters",
        parts=(
            *(
                ScriptedPart(at_s=at, kind="text", text="héß☃", num_tokens=1, pieces=5)
                for at in _FOUR
            ),
            *final_chunks(0.17, 4),
        ),
        truth=_PLAIN,
    ),
    Script(
        name="pings",
        about="comments while the prompt is computed, and `event:` and `id:` fields",
        parts=(
            _raw(0.03, b": ping\n\n"),
            _raw(0.06, b":\r\n\r\n"),
            _raw(0.08, b"event: message\nid: 7\n"),
            *token_chunks(_FOUR),
            *final_chunks(0.16, 4),
        ),
        truth=_PLAIN,
    ),
    Script(
        name="bare-data",
        about="`data:` without a space, lines that end with CR LF, two events in one write",
        parts=(
            _raw(0.10, b'data:{"choices":[{"index":0,"text":"a"}]}\r\n\r\n', 1),
            _raw(
                0.12,
                b'data:{"choices":[{"index":0,"text":"b"}]}\n\n'
                b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n',
                1,
            ),
            ScriptedPart(at_s=0.12, kind="usage", num_tokens=2),
            ScriptedPart(at_s=0.12, kind="done"),
        ),
        truth=_ok(0.10, 0.02, (0.02,), 0.12),
    ),
)

_BROKEN = (
    Script(
        name="refused-503",
        about="the queue is full",
        parts=(),
        status=503,
        body=b'{"error": {"message": "queue is full"}}',
        truth=_NOTHING,
    ),
    Script(
        name="failed-500",
        about="an internal error before the first token",
        parts=(),
        status=500,
        body=b"Internal Server Error",
        truth=_NOTHING,
    ),
    Script(
        name="error-event",
        about="an error event after two tokens",
        parts=(
            *token_chunks((0.10, 0.12)),
            _raw(0.14, b'data: {"error": {"message": "out of blocks"}}\n\n'),
            ScriptedPart(at_s=0.14, kind="done"),
        ),
        truth=_LOST_AFTER_TWO,
    ),
    Script(
        name="malformed",
        about="a data line that is not JSON, after two tokens",
        parts=(*token_chunks((0.10, 0.12)), _raw(0.14, b"data: {half\n\n")),
        truth=_LOST_AFTER_TWO,
    ),
    Script(
        name="cut",
        about="the connection drops after two tokens",
        parts=token_chunks((0.10, 0.12)),
        ending="cut",
        truth=_LOST_AFTER_TWO,
    ),
    Script(
        name="ends-early",
        about="the stream ends regularly, but without finish_reason or [DONE]",
        parts=token_chunks((0.10, 0.12)),
        truth=_LOST_AFTER_TWO,
    ),
    Script(
        name="hang",
        about="two tokens, then nothing until the client's timeout",
        parts=token_chunks((0.10, 0.12)),
        ending="hang",
        truth=ExpectedMetrics(
            outcome="timeout",
            ttft_s=0.10,
            tpot_s=0.02,
            itl_s=(0.02,),
            e2e_s=0.12,
            output_tokens=2,
            meets=False,
        ),
    ),
)

CASES: Mapping[str, Script] = MappingProxyType({s.name: s for s in (*_COMPLETE, *_BROKEN)})
