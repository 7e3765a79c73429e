"""CUDA graphs played on the CPU: operators are recorded once, and done again without Python.

A recording has a graph's properties. Nothing that Python decides is decided again: neither numbers
nor branches. Tensors made while recording keep their memory, which only the replay fills: after
the recording they hold NaN. Other tensors are known by their address alone: a replay that needs one
whose memory was freed meanwhile fails, as it would read garbage on a GPU. What a capture forbids
fails while recording: waiting for a number, sizes that depend on numbers, and data of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from ridgeline.engine.attention.tables import PackedInts
from ridgeline.engine.execution.graphs.decode import StepOutputs
from ridgeline.engine.execution.graphs.inputs import StepInputs

WAITS = {"_local_scalar_dense", "item", "is_nonzero", "equal"}
SHAPED_BY_NUMBERS = {"nonzero", "masked_select", "bincount", "unique_dim", "_unique2"}
HOST_DATA = {"lift_fresh", "_pin_memory", "pin_memory"}
FORBIDDEN = WAITS | SHAPED_BY_NUMBERS | HOST_DATA


class Forbidden(Exception):
    """An operator that a capture does not allow."""


class FreedMemory(Exception):
    """A replay would read memory that was given back."""


class Address:
    """A tensor of which a graph keeps the address."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        self.dtype = tensor.dtype

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise FreedMemory(f"{self.dtype} {list(self.place[1])}")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.place)


class Recorder(TorchDispatchMode):
    """Records the operators between `__enter__` and `__exit__`."""

    def __init__(self, own: dict[int, Tensor]) -> None:
        super().__init__()
        self.own = own  # tensors by the address of their storage, of all recordings of a pool
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in FORBIDDEN:
            raise Forbidden(name)
        if name == "index" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        ):
            raise Forbidden("index by a mask")
        if func._can_decompose():  # in inference mode, operators come whole
            with self:
                return func.decompose(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        aliases = [value.alias_info for value in func._schema.returns]
        if not any(aliases):
            tree_map_only(Tensor, self._keep, out)
        is_view = any(aliases) and not any(alias.is_write for alias in aliases if alias)
        if not is_view and not name.startswith(("empty", "new_empty")):
            places = tree_map_only(Tensor, self._place, (args, kwargs or {}))
            made = None if any(aliases) else tree_map_only(Tensor, self._place, out)
            self.steps.append((func, *places, made))
        return out

    def _keep(self, tensor: Tensor) -> None:
        self.own[tensor.untyped_storage().data_ptr()] = tensor

    def _place(self, tensor: Tensor) -> Any:
        return tensor if self.is_own(tensor) else Address(tensor)

    def is_own(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.own

    def poison(self) -> None:
        """What a capture leaves in memory is undefined."""
        for _, _, _, made in self.steps:
            tree_map_only(Tensor, _poison, made)

    @torch.inference_mode()
    def replay(self) -> None:
        with _disable_current_modes():
            self._replay()

    def _replay(self) -> None:
        for func, args, kwargs, made in self.steps:
            args, kwargs = tree_map_only(Address, Address.tensor, (args, kwargs))
            out = func(*args, **kwargs)
            if made is not None:
                tree_pairs(made, out)


def _poison(tensor: Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


def tree_pairs(made: Any, out: Any) -> None:
    """Copy what an operator returned to where it was when recorded."""
    if isinstance(made, Tensor):
        made.copy_(out)
    elif isinstance(made, (tuple, list)):
        for one, other in zip(made, out, strict=True):
            tree_pairs(one, other)


class RecordedPieces:
    """The protocol of `PieceCapture`."""

    def __init__(self) -> None:
        self.recorders: list[Recorder] = []
        self._own: dict[int, Tensor] = {}
        self.sessions = 0

    @contextmanager
    def session(self) -> Iterator[None]:
        first, self.sessions = len(self.recorders), self.sessions + 1
        yield
        for recorder in self.recorders[first:]:
            recorder.poison()

    def begin(self) -> None:
        self.recorders.append(Recorder(self._own))
        self.recorders[-1].__enter__()

    def end(self) -> Callable[[], None]:
        recorder = self.recorders[-1]
        recorder.__exit__(None, None, None)
        return recorder.replay


class RecordedCapture:
    """The protocol of `Capture`."""

    def __init__(self) -> None:
        self.pieces = RecordedPieces()

    def __call__(self, compute: Callable[[], StepOutputs]) -> Callable[[], StepOutputs]:
        with self.pieces.session():
            compute()
            self.pieces.begin()
            outputs = compute()
            replay = self.pieces.end()

        def run() -> StepOutputs:
            replay()
            return outputs

        return run


class StepWatch(TorchDispatchMode):
    """Counts what a step does between the host and the device, a recording's replay apart.

    `copies_of_integers`: of the packed integers. `host_data`: other tensors from lists or arrays.
    `waits`: results read back, each of which waits for the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies_of_integers = self.waits = self.host_data = 0
        self.seen: list[str] = []
        self._patches = pytest.MonkeyPatch()

    def __enter__(self) -> StepWatch:
        self._count(StepInputs, "copy", "copies_of_integers")
        self._count(PackedInts, "copy_to", "copies_of_integers")
        for reads in ("tolist", "numpy", "cpu"):
            self._count(Tensor, reads, "waits")
        self._count(torch, "from_numpy", "host_data")
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.undo()

    def _count(self, owner: Any, name: str, counter: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._add(counter, name)
            return original(*args, **kwargs)

        self._patches.setattr(owner, name, counted)

    def _add(self, counter: str, name: str) -> None:
        setattr(self, counter, getattr(self, counter) + 1)
        self.seen.append(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in WAITS | SHAPED_BY_NUMBERS:
            self._add("waits", name)
        if name in HOST_DATA:
            self._add("host_data", name)
        return func(*args, **(kwargs or {}))
