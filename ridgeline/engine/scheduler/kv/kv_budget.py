"""How much memory the KV cache gets, and the advice given when it is too little.

By default the cache gets a share of the memory that the weights leave, but no more than all slots
could ever fill. On a CPU the other half of that memory is the reserve of the machine's other work,
and the cache gets no more than a quarter of the free memory (or 4 GiB, vLLM's default, if that is
more). Without a requested context, the context is lowered to what such a cache holds
(`fitting_model_len`). A cache that cannot hold one sequence of `max_model_len` tokens is rejected
with the arithmetic and one change that fixes it.
"""

from __future__ import annotations

import msgspec

from ridgeline.errors import DoesNotFit
from ridgeline.modelspec.cost.kv_layout import ONE_GROUP, KvLayout

GIB = 1 << 30
_SHARE = {"cpu": 0.5, "cuda": 0.9}  # of what the weights leave
_MIN_CEILING = {"cpu": 4 * GIB}
_CEILING_SHARE = 0.25  # of the free memory, where that is more
_LEN_MULTIPLE = 1024  # to which a lowered context is rounded down
MIN_MODEL_LEN = 256  # no context is lowered further
_CUDA_WORKSPACE_BYTES = 2 * GIB  # activations, logits and the allocator's slack


class KvBudgetInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the budget is derived from; `requested_bytes` overrides the derivation.

    `kv_bytes_per_token` counts the target model and its draft model, of which `draft_kv_bytes` are
    the draft model's. `max_run_tokens` is the most tokens of one sequence in a step, which layers
    with a window keep beyond it.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    memory_bytes: int
    available_bytes: int
    device: str
    requested_bytes: int | None
    layout: KvLayout = ONE_GROUP
    max_run_tokens: int = 1
    draft_kv_bytes: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of one group of layers, the draft model's block included."""
        if not self.layout.windowed:
            return self.block_size * self.kv_bytes_per_token
        return self.layout.block_bytes(self.block_size) + self.block_size * self.draft_kv_bytes

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks for one sequence of `max_model_len` tokens."""
        return self.layout.max_blocks(self.max_model_len, self.block_size, self.max_run_tokens)

    def longest_sequence(self, nbytes: int) -> int:
        """Tokens of the longest sequence that a cache of `nbytes` holds.

        With windows, up to `max_model_len`: a model in which every layer has one has no limit.
        """
        num_blocks = nbytes // self.block_bytes
        if not self.layout.windowed:
            return num_blocks * self.block_size
        return self.layout.max_tokens(
            num_blocks, self.block_size, self.max_run_tokens, self.max_model_len
        )

    @property
    def left_bytes(self) -> int:
        """Available memory minus the weights (and the workspace of a GPU)."""
        workspace = _CUDA_WORKSPACE_BYTES if self.device == "cuda" else 0
        return max(0, self.available_bytes - self.weight_bytes - workspace)


class KvBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the KV cache in bytes and blocks, each with its derivation in words."""

    nbytes: int
    num_blocks: int
    why: str
    num_blocks_why: str


def kv_budget(inputs: KvBudgetInputs) -> KvBudget:
    """Derive the budget.

    Raises DoesNotFit if one sequence of `max_model_len` tokens would not fit, or if weights and
    cache exceed the available memory.
    """
    if inputs.requested_bytes is None:
        nbytes, why = _default_bytes(inputs)
    else:
        nbytes, why = inputs.requested_bytes, "as requested"
    num_blocks = nbytes // inputs.block_bytes
    if num_blocks < inputs.blocks_per_sequence:
        needed = inputs.blocks_per_sequence * inputs.block_bytes
        can_grow = inputs.requested_bytes is not None and needed <= inputs.left_bytes
        raise DoesNotFit(
            "the KV cache cannot hold one sequence of --max-model-len\n"
            + budget_table(inputs, nbytes),
            fix=f"use --kv-cache-memory-bytes {needed}" if can_grow else _shorten(inputs, nbytes),
        )
    if inputs.weight_bytes + nbytes > inputs.available_bytes:
        spare = int(_SHARE[inputs.device] * inputs.left_bytes)
        fits = spare // inputs.block_bytes >= inputs.blocks_per_sequence
        raise DoesNotFit(
            "weights and KV cache exceed the available memory\n" + budget_table(inputs, nbytes),
            fix=f"use --kv-cache-memory-bytes {spare}" if fits else _shorten(inputs, spare),
        )
    return KvBudget(
        nbytes=nbytes, num_blocks=num_blocks, why=why, num_blocks_why=_why_blocks(inputs, nbytes)
    )


def _why_blocks(inputs: KvBudgetInputs, nbytes: int) -> str:
    if not inputs.layout.windowed:
        block = f"{inputs.block_size} tokens · {size(inputs.kv_bytes_per_token)}"
        return f"{size(nbytes)} / ({block})"
    num_groups, num_windowed = inputs.layout.num_groups, len(inputs.layout.windowed)
    kept = "the tokens of the block being filled" if inputs.layout.recent else "a window"
    return (
        f"{size(nbytes)} / {size(inputs.block_bytes)} for {inputs.block_size} tokens of one of"
        f" {num_groups} groups of layers; {num_windowed} of them keep {kept} only"
    )


def _default_bytes(inputs: KvBudgetInputs) -> tuple[int, str]:
    """The smallest of three limits, and its name."""
    share = _SHARE[inputs.device]
    all_slots = inputs.max_num_seqs * inputs.blocks_per_sequence * inputs.block_bytes
    limits = {
        f"{share:.0%} of the {size(inputs.left_bytes)} that the weights leave": int(
            share * inputs.left_bytes
        ),
        f"what {inputs.max_num_seqs} sequences of {inputs.max_model_len} tokens need": all_slots,
    }
    if inputs.device in _MIN_CEILING:
        ceiling = max(_MIN_CEILING[inputs.device], int(_CEILING_SHARE * inputs.available_bytes))
        limits[f"the default ceiling on {inputs.device}"] = ceiling
    why = min(limits, key=lambda name: limits[name])
    return limits[why], why


def fitting_model_len(inputs: KvBudgetInputs) -> int:
    """The longest context, up to `max_model_len`, that the default cache holds once.

    It is `max_model_len` where not even a short one fits, which `kv_budget` then reports.
    """
    nbytes, _ = _default_bytes(inputs)
    tokens = inputs.longest_sequence(nbytes)
    if tokens >= inputs.max_model_len or tokens < MIN_MODEL_LEN:
        return inputs.max_model_len
    return tokens // _LEN_MULTIPLE * _LEN_MULTIPLE or tokens


def _shorten(inputs: KvBudgetInputs, nbytes: int) -> str:
    """Advice for a cache of `nbytes`: shorter sequences, or else less memory used elsewhere."""
    tokens = inputs.longest_sequence(nbytes)
    if tokens >= 1:
        return f"use --max-model-len {min(tokens, inputs.max_model_len)}"
    missing = size(inputs.weight_bytes + inputs.block_bytes)
    return f"free {missing} of memory, or use a smaller model"


def budget_table(inputs: KvBudgetInputs, nbytes: int) -> str:
    """The arithmetic behind a budget of `nbytes`, one line per term."""
    per_sequence = inputs.blocks_per_sequence * inputs.block_bytes
    capacity = nbytes // inputs.block_bytes * inputs.block_size // inputs.layout.num_groups
    rows = [
        ("memory available", size(inputs.available_bytes), f"of {size(inputs.memory_bytes)}"),
        ("weights", size(inputs.weight_bytes), ""),
        ("KV per token", size(inputs.kv_bytes_per_token), ""),
        (
            "KV of one sequence",
            size(per_sequence),
            f"{inputs.max_model_len} tokens in blocks of {inputs.block_size}",
        ),
        ("KV cache", size(nbytes), f"holds {capacity} tokens"),
    ]
    return "\n".join(f"  {name:<20}{value:>12}  {note}".rstrip() for name, value, note in rows)


def size(nbytes: float) -> str:
    """Bytes in binary units, for example 1.5 GiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while nbytes >= 1024 and power < len(units) - 1:
        nbytes, power = nbytes / 1024, power + 1
    return f"{nbytes:.1f} {units[power]}" if power else f"{nbytes:.0f} B"
