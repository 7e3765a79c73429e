"""A request as the gateway sees it: its bytes, and the few fields that decide where it goes."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from ridgeline.fleet.relay import StreamRelay

_PIECE_BYTES = 256
_PIECE_TOKENS = 64  # of text at the usual four bytes per token
_MAX_PIECES = 256
_EMPTY = msgspec.Raw(b"")


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


class RoutedCall(msgspec.Struct, kw_only=True):
    """One request of a client, over all the backends that it is sent to.

    `prefix`, `prefix_block`, `num_prompt`, `session` and `ttft_slo_s` are what routing policies
    read. `num_crashes`: backends that broke off without having brought it any further.
    """

    path: str
    body: bytes
    headers: list[tuple[bytes, bytes]]
    model: str | None = None
    streamed: bool = False
    prefix: tuple[int, ...] = ()
    prefix_block: int = _PIECE_TOKENS
    num_prompt: int = 1
    session: str = ""
    ttft_slo_s: float | None = None
    timeout_s: float | None = None
    relay: StreamRelay = msgspec.field(default_factory=StreamRelay)
    num_crashes: int = 0
    num_retries: int = 0
    excluded: set[int] = msgspec.field(default_factory=set)

    @property
    def digest(self) -> bytes:
        """Of the body: equal for a request that is sent again."""
        return blake2b(self.path.encode() + b"\0" + self.body, digest_size=16).digest()


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
