"""How much memory the KV cache gets, and what to do when it is too little.

The default is a share of what the weights leave, no more than every seat could ever fill, and on a
CPU no more than 4 GiB (the memory is the machine's own; vLLM's CPU default is the same). A cache
that cannot hold one sequence of `max_model_len` is refused, with the arithmetic and one change that
mends it.
"""

from __future__ import annotations

import msgspec

from ridgeline.errors import DoesNotFit

GIB = 1 << 30
_SHARE = {"cpu": 0.5, "cuda": 0.9}  # of what the weights leave; a CPU's memory has other tenants
_MOST_BYTES = {"cpu": 4 * GIB}
_CUDA_WORKSPACE_BYTES = 2 * GIB  # activations, logits and the allocator's slack


class KvBudgetInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the budget is derived from. `requested_bytes` None: derive it."""

    weight_bytes: int
    kv_bytes_per_token: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    memory_bytes: int
    available_bytes: int
    device: str
    requested_bytes: int | None

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.kv_bytes_per_token

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks of one sequence of `max_model_len` tokens."""
        return -(-self.max_model_len // self.block_size)

    @property
    def left_bytes(self) -> int:
        """What the weights leave of the memory that is available."""
        workspace = _CUDA_WORKSPACE_BYTES if self.device == "cuda" else 0
        return max(0, self.available_bytes - self.weight_bytes - workspace)


class KvBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the KV cache, the blocks that they hold, and why."""

    nbytes: int
    num_blocks: int
    why: str
    num_blocks_why: str


def kv_budget(asked: KvBudgetInputs) -> KvBudget:
    """The budget; DoesNotFit where one sequence of `max_model_len` would not fit."""
    nbytes, why = (
        _share(asked) if asked.requested_bytes is None else (asked.requested_bytes, "asked for")
    )
    num_blocks = nbytes // asked.block_bytes
    if num_blocks < asked.blocks_per_sequence:
        raise _too_small(asked, nbytes)
    _check_available(asked, nbytes)
    return KvBudget(
        nbytes=nbytes,
        num_blocks=num_blocks,
        why=why,
        num_blocks_why=(
            f"{size(nbytes)} / ({asked.block_size} tokens · {size(asked.kv_bytes_per_token)})"
        ),
    )


def _share(asked: KvBudgetInputs) -> tuple[int, str]:
    """The default: the least of three bounds, by name."""
    share = _SHARE[asked.device]
    everybody = asked.max_num_seqs * asked.blocks_per_sequence * asked.block_bytes
    bounds = {
        f"{share:.0%} of the {size(asked.left_bytes)} that the weights leave": int(
            share * asked.left_bytes
        ),
        f"what {asked.max_num_seqs} sequences of {asked.max_model_len} tokens need": everybody,
    }
    if asked.device in _MOST_BYTES:
        bounds[f"the default ceiling on {asked.device}"] = _MOST_BYTES[asked.device]
    why = min(bounds, key=lambda name: bounds[name])
    return bounds[why], why


def _check_available(asked: KvBudgetInputs, nbytes: int) -> None:
    """An explicit budget is obeyed as far as there is memory for it."""
    if asked.weight_bytes + nbytes <= asked.available_bytes:
        return
    spare = int(_SHARE[asked.device] * asked.left_bytes)
    fits = spare // asked.block_bytes >= asked.blocks_per_sequence
    raise DoesNotFit(
        "weights and KV cache exceed the memory that is available\n" + budget_table(asked, nbytes),
        fix=f"use --kv-cache-memory-bytes {spare}" if fits else _shorter(asked, spare),
    )


def _too_small(asked: KvBudgetInputs, nbytes: int) -> DoesNotFit:
    """One change that mends it: more memory where there is some, else shorter sequences."""
    needed = asked.blocks_per_sequence * asked.block_bytes
    more = asked.requested_bytes is not None and needed <= asked.left_bytes
    return DoesNotFit(
        "the KV cache cannot hold one sequence of --max-model-len\n" + budget_table(asked, nbytes),
        fix=f"use --kv-cache-memory-bytes {needed}" if more else _shorter(asked, nbytes),
    )


def _shorter(asked: KvBudgetInputs, nbytes: int) -> str:
    tokens = nbytes // asked.block_bytes * asked.block_size
    if tokens >= 1:
        return f"use --max-model-len {min(tokens, asked.max_model_len)}"
    return f"free {size(asked.weight_bytes + asked.block_bytes)} of memory, or use a smaller model"


def budget_table(asked: KvBudgetInputs, nbytes: int) -> str:
    """The arithmetic, line by line."""
    per_sequence = asked.blocks_per_sequence * asked.block_bytes
    holds = nbytes // asked.block_bytes * asked.block_size
    rows = [
        ("memory available", size(asked.available_bytes), f"of {size(asked.memory_bytes)}"),
        ("weights", size(asked.weight_bytes), ""),
        ("KV per token", size(asked.kv_bytes_per_token), ""),
        (
            "KV of one sequence",
            size(per_sequence),
            f"{asked.max_model_len} tokens in blocks of {asked.block_size}",
        ),
        ("KV cache", size(nbytes), f"holds {holds} tokens"),
    ]
    return "\n".join(f"  {name:<20}{value:>12}  {note}".rstrip() for name, value, note in rows)


def size(nbytes: float) -> str:
    """Bytes for people: 1.5 GiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while nbytes >= 1024 and power < len(units) - 1:
        nbytes, power = nbytes / 1024, power + 1
    return f"{nbytes:.1f} {units[power]}" if power else f"{nbytes:.0f} B"
