"""A request as the gateway sees it: its bytes, and the few fields that decide where it goes."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

import msgspec

from ridgeline.fleet.canary.rollout import Arm
from ridgeline.fleet.relay import StreamRelay
from ridgeline.records import Slo

_PIECE_BYTES = 256
_PIECE_TOKENS = 64  # of text at the usual four bytes per token
_MAX_PIECES = 256
_EMPTY = msgspec.Raw(b"")

Trial = Literal["none", "apart", "alone"]


class RoutedBody(msgspec.Struct):
    """Fields of a body that decide where it goes; texts stay JSON."""

    model: str | None = None
    stream: bool | None = None
    prompt: msgspec.Raw = _EMPTY
    system: msgspec.Raw = _EMPTY
    messages: msgspec.Raw = _EMPTY
    input: msgspec.Raw = _EMPTY
    user: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    slo_class: str | None = None
    timeout_ms: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_output_tokens or self.max_tokens


class RoutedCall(msgspec.Struct, kw_only=True):
    """One request of a client, over all the backends that it is sent to.

    `prefix`, `prefix_block`, `num_prompt`, `session` and `ttft_slo_s` are what routing policies
    read. `digest` of the body: equal for a request that is sent again. `num_setbacks`: backends in
    a row that broke off without having brought it any further. `trial`: whether it may be what
    crashes servers, and then needs one without another such request, if possible or at any rate.
    `stopping`: backends that have refused it because they were stopping.

    What came of it: `status` is that of its response, 0 before; `answer` the body of one that is
    not a stream. `sent_s`, `first_s` and `ended_s` are instants of the gateway's RunningClock: sent
    to the last backend, its first byte, and the end. `failed_arms`: versions with a backend that
    failed it, even if another one answered.
    """

    path: str
    body: bytes
    digest: bytes
    headers: list[tuple[bytes, bytes]]
    model: str | None = None
    streamed: bool = False
    prefix: tuple[int, ...] = ()
    prefix_block: int = _PIECE_TOKENS
    num_prompt: int = 1
    session: str = ""
    ttft_slo_s: float | None = None
    timeout_s: float | None = None
    max_tokens: int | None = None
    relay: StreamRelay = msgspec.field(default_factory=StreamRelay)
    num_setbacks: int = 0
    trial: Trial = "none"
    num_retries: int = 0
    excluded: set[int] = msgspec.field(default_factory=set)
    stopping: set[int] = msgspec.field(default_factory=set)
    slo: Slo | None = None
    arm: Arm = "stable"
    failed_arms: set[str] = msgspec.field(default_factory=set)
    has_failed: bool = False
    status: int = 0
    answer: bytes = b""
    sent_s: float = 0.0
    first_s: float | None = None
    ended_s: float = 0.0
    backend: str = ""
    num_attempts: int = 0
    num_bytes: int = 0
    num_first_units: int = 0
    fallback: Literal["possible", "next", "tried"] = "possible"


def digest_of(path: str, body: bytes) -> bytes:
    """Of a request: equal for one that is sent again."""
    return blake2b(path.encode() + b"\0" + body, digest_size=16).digest()


def read_body(body: bytes) -> RoutedBody:
    """The fields that decide where a body goes; none of a body that is not understood, which its
    backend will refuse."""
    try:
        return msgspec.json.decode(body, type=RoutedBody)
    except (msgspec.DecodeError, RecursionError):
        return RoutedBody()


def prompt_pieces(body: RoutedBody, tenant: bytes) -> tuple[tuple[int, ...], int]:
    """A chain of digests over the leading pieces of the prompt, and its length in tokens, by
    estimate: any backend's tokens are unknown here. Tenants share no prefixes."""
    text = bytes(body.system) + bytes(body.messages or body.prompt or body.input)
    key = blake2b(tenant + (body.cache_salt or "").encode(), digest_size=16).digest()
    pieces, chain = [], blake2b(key=key, digest_size=8)
    num_pieces = min(len(text) // _PIECE_BYTES, _MAX_PIECES)
    for i in range(num_pieces):
        chain.update(text[i * _PIECE_BYTES : (i + 1) * _PIECE_BYTES])
        pieces.append(int.from_bytes(chain.digest(), "little"))
    return tuple(pieces), max(1, len(text) * _PIECE_TOKENS // _PIECE_BYTES)
