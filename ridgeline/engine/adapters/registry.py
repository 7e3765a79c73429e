"""The adapters of an engine: loaded by name, chosen per request, applied by the runner."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from ridgeline.engine.adapters.modules import why_no_adapters
from ridgeline.engine.adapters.peft_config import CONFIG_FILE
from ridgeline.engine.adapters.products import (
    LoadedAdapter,
    StepAdapters,
    adapt_block,
    load_products,
)
from ridgeline.engine.adapters.stacked import AdapterStack
from ridgeline.engine.adapters.weights import WEIGHTS_FILE, AdapterWeights, read_adapter
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.scheduler.plan import Run
from ridgeline.errors import BadInput, CannotRun

NO_ADAPTER = -1
"""The place of rows of the base model."""


class RunAdapters(Protocol):
    """Prepares a step for the adapters of its runs."""

    def begin(self, runs: Sequence[Run]) -> None:
        """The next forward pass feeds these runs, one after the other."""
        ...


class NoAdapters:
    """Every run uses the base model."""

    def begin(self, runs: Sequence[Run]) -> None:
        pass


class AdapterInfo(msgspec.Struct, frozen=True):
    """A loaded adapter. Its `id` follows from its files, so that cached prefixes, which may outlive
    the engine on disk, belong to its weights and not to its name."""

    name: str
    id: int
    nbytes: int


class AdapterRegistry:
    """Adapters over one decoder, at most `max_adapters` of ranks up to `max_rank`.

    `stacked` adapters are also held as one stack, by which CUDA graphs add them.

    `begin` is called on the engine thread, everything else on any thread.
    """

    def __init__(
        self, decoder: Decoder, max_adapters: int, max_rank: int, *, stacked: bool = False
    ) -> None:
        reason = why_no_adapters(decoder.spec)
        if reason is not None:
            raise CannotRun(
                f"no adapter can be added to {decoder.spec.name}: {reason}",
                fix="leave out --enable-lora",
            )
        self._decoder, self._max_adapters, self._max_rank = decoder, max_adapters, max_rank
        self._step, self._lock = StepAdapters(), threading.Lock()
        self._by_name: dict[str, AdapterInfo] = {}
        self._by_id: dict[int, LoadedAdapter] = {}
        self._places: dict[int, int] = {}  # in the stack, by id
        self._stack: AdapterStack | None = None
        if stacked:
            kind = decoder.device, decoder.compute_dtype
            self._stack = AdapterStack(decoder.spec, max_adapters, max_rank, *kind)
        for layer, block in enumerate(decoder.blocks):
            adapt_block(block, layer, self._step)

    @property
    def loaded(self) -> tuple[AdapterInfo, ...]:
        """The loaded adapters in the order of loading."""
        return tuple(self._by_name.values())

    def id_of(self, name: str) -> int:
        """Raises BadInput for an unknown name."""
        info = self._by_name.get(name)
        if info is None:
            known = ", ".join(self._by_name) or "none is loaded"
            raise BadInput("unknown adapter", value=name, limit=known)
        return info.id

    def load(self, name: str, directory: str) -> AdapterInfo:
        """Load an adapter from a PEFT directory. Raises BadInput, BadModel or CannotRun."""
        with self._lock:
            self._check_new(name)
            decoder = self._decoder
            path = Path(directory)
            if not path.is_dir():
                fix = "name a directory with adapter_config.json and adapter_model.safetensors"
                raise BadInput("the adapter's directory does not exist", value=directory, fix=fix)
            with torch.inference_mode():
                weights = read_adapter(path, decoder.spec, self._max_rank)
                loaded = load_products(weights, decoder.spec, decoder.device, decoder.compute_dtype)
            info = AdapterInfo(name, _content_id(path), loaded.nbytes)
            self._put(info.id, weights)
            self._by_id[info.id] = loaded
            self._by_name[name] = info
        return info

    def unload(self, name: str) -> None:
        """Forget an adapter; requests that still use it fail. Raises BadInput."""
        with self._lock:
            adapter_id = self.id_of(name)
            del self._by_name[name]
            if all(own.id != adapter_id for own in self._by_name.values()):
                del self._by_id[adapter_id]
                self._places.pop(adapter_id, None)

    @torch.inference_mode()
    def _put(self, adapter_id: int, weights: AdapterWeights) -> None:
        if self._stack is not None and adapter_id not in self._places:
            used = self._places.values()
            place = next(i for i in range(self._max_adapters) if i not in used)
            self._stack.put(place, weights)
            self._places[adapter_id] = place

    def place_of(self, run: Run) -> int:
        """Where the stack has the adapter of a run. Raises BadInput if it was unloaded."""
        if not run.adapter:
            return NO_ADAPTER
        self._find(run.adapter)
        return self._places[run.adapter]

    @contextmanager
    def of_rows(self, places_T: torch.Tensor) -> Iterator[None]:
        """Within it, each row of the step uses the adapter at its place of the stack."""
        assert self._stack is not None, "adapters were not stacked"
        self._step.stacked = self._stack, self._stack.mask(places_T)
        try:
            yield
        finally:
            self._step.stacked = None

    def begin(self, runs: Sequence[Run]) -> None:
        rows: dict[int, list[int]] = {}
        at = 0
        for run in runs:
            end = at + len(run.tokens)
            if run.adapter:
                rows.setdefault(run.adapter, []).extend(range(at, end))
            at = end
        self._step.groups = tuple(
            (self._find(adapter_id), self._index(own, at)) for adapter_id, own in rows.items()
        )

    def _find(self, adapter_id: int) -> LoadedAdapter:
        adapter = self._by_id.get(adapter_id)
        if adapter is None:
            raise BadInput("the adapter of this request was unloaded", fix="load it again")
        return adapter

    def _index(self, rows: list[int], num_rows: int) -> torch.Tensor | None:
        return None if len(rows) == num_rows else torch.tensor(rows, device=self._decoder.device)

    def _check_new(self, name: str) -> None:
        if not name or "/" in name or len(name) > 200:
            raise BadInput(
                "an adapter's name is not usable", value=name, limit="1 to 200 characters, no /"
            )
        if name in self._by_name:
            raise BadInput("an adapter of this name is loaded", value=name, fix="unload it first")
        if len(self._by_name) >= self._max_adapters:
            raise BadInput(
                "no more adapters can be loaded",
                value=len(self._by_name) + 1,
                limit=f"--max-loras {self._max_adapters}",
                fix="unload one, or serve with a larger --max-loras",
            )


def _content_id(directory: Path) -> int:
    """A positive number of 63 bits that follows from the adapter's files."""
    digest = blake2b(digest_size=8, person=b"lora-adapter")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        digest.update((directory / name).read_bytes())
    return int.from_bytes(digest.digest(), "little") >> 1 or 1
