"""The handle by which one server fetches the KV blocks of a prompt from another."""

from __future__ import annotations

import msgspec

TRANSFER_FALLBACKS = (
    *("not_allowed", "unsupported", "slower", "signature", "content", "lease", "prefill_failed"),
    *("unreachable", "lost", "stalled", "checksum", "no_room", "timeout"),
)
"""Why blocks that another server was to hand over are computed here."""


class KvTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's `kv_transfer_params`, with the same meaning for proxies that pass them on unread.

    A request with `do_remote_decode` asks a prefill server to compute the prompt and to keep its
    blocks. The answer has `do_remote_prefill`, where the blocks are (`remote_host`,
    `remote_port`), the lease that keeps them (`remote_request_id`), what they were computed with
    (`remote_engine_id`), and how many tokens they hold. With these, the request goes to a decode
    server.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str = ""
    remote_host: str = ""
    remote_port: int = 0
    remote_request_id: str = ""
    num_tokens: int = 0
