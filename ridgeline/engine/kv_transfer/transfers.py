"""The engine's part in a disaggregated fleet: what it hands out, and what it fetches.

Absence is `NoTransfers`: the engine does the same with and without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.config import ResolvedSettings
from ridgeline.engine.kv_tiers.block_slab import BlockSlab
from ridgeline.engine.kv_tiers.block_tiers import BlockTiers, EngineBlockTiers
from ridgeline.engine.kv_tiers.signature import cache_signature
from ridgeline.engine.kv_transfer.block_fetcher import TIER, PeerClient
from ridgeline.engine.kv_transfer.block_server import BlockServer
from ridgeline.engine.kv_transfer.leases import PrefixLeases
from ridgeline.engine.kv_transfer.shared_memory import SharedRows
from ridgeline.records import KvTransferParams

_LOG = logging.getLogger(__name__)
LOCAL_PEERS = ("127.0.0.1:*",)
"""The prefill servers that a decode server fetches from where none were named."""


class Transfers(Protocol):
    """Blocks that leave and enter this engine."""

    def watch(self, abort: Callable[[str], None], wake: Callable[[], None]) -> None:
        """`abort` ends a request whose lease was closed; `wake` is called, from any thread,
        after each fetch."""
        ...

    def open_lease(self, prompt: Sequence[int]) -> KvTransferParams | None:
        """Announce that a prompt will be computed for another server.

        None if this server hands out nothing, or the prompt fills no block. The request that
        computes it has the first `num_tokens` of the prompt and names the lease.
        """
        ...

    def bind(self, lease_id: str, request_id: str) -> None:
        """The request that computes the blocks of a lease was submitted."""
        ...

    def close_lease(self, lease_id: str) -> None:
        """The prompt will not be computed, or no server will fetch it."""
        ...

    def after_commit(self) -> None:
        """Copy what a step has computed for others, and announce it. On the engine thread."""
        ...

    def counters(self) -> dict[str, float]:
        """Totals: `kv_transfer_NAME`, and `kv_transfer_fallbacks/REASON`."""
        ...

    def describe(self) -> str:
        """The role, and how blocks move."""
        ...

    def close(self) -> None:
        """Stop the threads."""
        ...


class NoTransfers:
    """A server that computes its prompts and keeps its blocks."""

    def watch(self, abort: Callable[[str], None], wake: Callable[[], None]) -> None:
        pass

    def open_lease(self, prompt: Sequence[int]) -> KvTransferParams | None:
        return None

    def bind(self, lease_id: str, request_id: str) -> None:
        pass

    def close_lease(self, lease_id: str) -> None:
        pass

    def after_commit(self) -> None:
        pass

    def counters(self) -> dict[str, float]:
        return {}

    def describe(self) -> str:
        return "none"

    def close(self) -> None:
        pass


class BlockTransfers:
    """The server of a prefill engine, the client of a decode engine, or both."""

    def __init__(
        self,
        slab: BlockSlab,
        signature: str,
        leases: PrefixLeases | None,
        server: BlockServer | None,
        client: PeerClient | None,
        shared: SharedRows | None,
    ) -> None:
        self._slab, self._signature, self._shared = slab, signature, shared
        self.leases, self.server, self.client = leases, server, client

    def watch(self, abort: Callable[[str], None], wake: Callable[[], None]) -> None:
        if self.leases is not None:
            self.leases.abort = abort
        if self.client is not None:
            self.client.on_loaded = wake

    def open_lease(self, prompt: Sequence[int]) -> KvTransferParams | None:
        if self.leases is None or self.server is None:
            return None
        lease = self.leases.open(prompt)
        if lease is None:
            return None
        return KvTransferParams(
            do_remote_prefill=True,
            remote_engine_id=self._signature,
            remote_host=self.server.host,
            remote_port=self.server.port,
            remote_request_id=lease.id,
            num_tokens=lease.num_tokens,
        )

    def bind(self, lease_id: str, request_id: str) -> None:
        if self.leases is not None:
            self.leases.bind(lease_id, request_id)

    def close_lease(self, lease_id: str) -> None:
        if self.leases is not None:
            self.leases.close(lease_id)

    def after_commit(self) -> None:
        leases = self.leases
        if leases is None or not leases.has_changed:
            return
        failed = False
        try:
            if stores := leases.take_stores():
                self._slab.transfer(stores, ())
        except Exception:
            _LOG.exception("computed blocks could not be copied for another server")
            failed = True
        leases.commit(failed=failed)

    def counters(self) -> dict[str, float]:
        values: dict[str, float] = {}
        if self.leases is not None and self.server is not None:
            values |= {
                "kv_transfer_leases": float(self.leases.num_opened),
                "kv_transfer_expired_leases": float(self.leases.num_expired),
                "kv_transfer_open_leases": float(len(self.leases)),
                "kv_transfer_sent_bytes": float(self.server.num_bytes),
            }
        if (client := self.client) is not None:
            values |= {
                "kv_transfer_fetches": float(client.num_fetches),
                "kv_transfer_fetched_bytes": float(client.num_bytes),
                "kv_transfer_shared_bytes": float(client.num_shared_bytes),
                "kv_transfer_fetch_s": client.fetch_s,
                f"kv_tier_loads/{TIER}": float(client.num_blocks),
                f"kv_tier_load_bytes/{TIER}": float(client.num_bytes),
                f"kv_tier_bandwidth/{TIER}": client.rate.bytes_s,
            }
            for reason, num in list(client.fallbacks.items()):
                values[f"kv_transfer_fallbacks/{reason}"] = float(num)
        return values

    def describe(self) -> str:
        parts = []
        if self.server is not None:
            how = "TCP" if self._shared is None else "shared memory or TCP"
            parts.append(f"hands out blocks at {self.server.host}:{self.server.port} by {how}")
        if self.client is not None:
            parts.append("fetches blocks")
        return ", ".join(parts)

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
        if self.server is not None:
            self.server.close()
        if self._shared is not None:
            self._shared.close()


class SharedSlots:
    """The memory of the slots, which decode servers on the same host may map."""

    def __init__(self, resolved: ResolvedSettings) -> None:
        hands_out = resolved.disaggregation_mode in ("prefill", "both")
        may_share = resolved.disaggregation_transfer_backend != "tcp" and resolved.device == "cpu"
        self._is_wanted = hands_out and may_share
        self.memory: SharedRows | None = None

    def allocate(self, num_slots: int, block_bytes: int) -> npt.NDArray[np.uint8] | None:
        """The rows of the slots; None where blocks go over TCP only."""
        if not self._is_wanted:
            return None
        try:
            self.memory = SharedRows(num_slots, block_bytes)
        except OSError as error:
            _LOG.warning("KV blocks go over TCP: no shared memory (%s)", error)
            return None
        return self.memory.rows


def build_transfers(
    resolved: ResolvedSettings, kv: KvCache, block_tiers: BlockTiers, shared: SharedRows | None
) -> Transfers:
    """What the mode names, over the memory tier. Raises CannotRun."""
    mode = resolved.disaggregation_mode
    if mode == "none" or not isinstance(block_tiers, EngineBlockTiers):
        return NoTransfers()
    tiers, slab, timeout_s = block_tiers.tiers, block_tiers.slab, resolved.disaggregation_timeout_s
    memo = None if resolved.kv_tier_dir is None else Path(resolved.kv_tier_dir)
    signature = cache_signature(resolved, kv, memo)
    leases, server, client = None, None, None
    if mode in ("prefill", "both"):
        leases = PrefixLeases(tiers.memory, kv.layout, resolved.block_size, timeout_s)
        host, port = resolved.disaggregation_host, resolved.disaggregation_port
        server = BlockServer(leases, slab, signature, host, port, shared)
        tiers.exports = leases
    if mode in ("decode", "both"):
        client = PeerClient(
            tiers.memory,
            slab,
            signature,
            peers=resolved.disaggregation_peers or LOCAL_PEERS,
            transport=resolved.disaggregation_transfer_backend,
            timeout_s=timeout_s,
        )
        tiers.peers = client
    return BlockTransfers(slab, signature, leases, server, client, shared)
