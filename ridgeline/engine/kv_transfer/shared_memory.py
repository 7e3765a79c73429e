"""Memory that another process on the same host can read, without a name that could be left over.

An anonymous file (memfd) lives as long as a process has it open. Another process of the same user
opens it through /proc; one of another host, container or user cannot, or finds another nonce, and
the blocks go over TCP.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections import OrderedDict
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ridgeline.engine.kv_transfer.wire import SharedMemory

HEAD_BYTES = 4096
"""Before the first row: the nonce."""

_NONCE_BYTES = 32
_MAX_OPEN = 16


class SharedRows:
    """`num_rows` rows of `row_bytes` in an anonymous file. Raises OSError."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self._descriptor = os.memfd_create("ridgeline-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        num_bytes = HEAD_BYTES + num_rows * row_bytes
        nonce = secrets.token_bytes(_NONCE_BYTES)
        try:
            os.ftruncate(self._descriptor, num_bytes)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._map = mmap.mmap(self._descriptor, num_bytes)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._map[:_NONCE_BYTES] = nonce
        self.address = SharedMemory(os.getpid(), self._descriptor, num_bytes, nonce)
        flat = np.frombuffer(self._map, np.uint8, offset=HEAD_BYTES)
        self.rows: npt.NDArray[np.uint8] = flat.reshape(num_rows, row_bytes)

    def close(self) -> None:
        """No process can open the memory any more; those that have may still read it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class ForeignRows:
    """The rows of other processes that were opened, by their addresses."""

    def __init__(self) -> None:
        self._open: OrderedDict[bytes, npt.NDArray[np.uint8]] = OrderedDict()

    def rows(self, address: SharedMemory, row_bytes: int) -> npt.NDArray[np.uint8] | None:
        """The rows, read-only; None if they cannot be opened here."""
        rows = self._open.get(address.nonce)
        if rows is None:
            rows = _open_rows(address, row_bytes)
            if rows is not None:
                self._open[address.nonce] = rows
                while len(self._open) > _MAX_OPEN:
                    with suppress(KeyError):
                        self._open.popitem(last=False)
        return rows


def _open_rows(address: SharedMemory, row_bytes: int) -> npt.NDArray[np.uint8] | None:
    num_rows = (address.num_bytes - HEAD_BYTES) // row_bytes
    if num_rows <= 0 or address.pid <= 0 or address.descriptor < 0:
        return None
    try:
        path = f"/proc/{address.pid}/fd/{address.descriptor}"
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_size != address.num_bytes:
            return None
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return None  # its owner could cut it off under the reader
        mapped = mmap.mmap(descriptor, address.num_bytes, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    if mapped[:_NONCE_BYTES] != address.nonce or len(address.nonce) != _NONCE_BYTES:
        return None
    flat = np.frombuffer(mapped, np.uint8, num_rows * row_bytes, HEAD_BYTES)
    return flat.reshape(num_rows, row_bytes)
