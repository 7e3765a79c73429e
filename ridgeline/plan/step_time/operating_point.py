"""One operating point of a closed loop: a model, devices, formats, techniques and a workload."""

from __future__ import annotations

from typing import Literal

import msgspec

from ridgeline.config.settings import Speculative
from ridgeline.errors import BadInput
from ridgeline.plan.step_time.adapters import DEFAULT_RANK
from ridgeline.plan.step_time.replica import Replica
from ridgeline.plan.step_time.tier_loads import TierHits
from ridgeline.records import KvEviction

MAX_NUM_BATCHED_TOKENS = 8192
MAX_NUM_SEQS = 256
ENGINE_TOKENS, ENGINE_NUM_SEQS = 512, 64  # defaults of Ridgeline's engine on a CPU


class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The replicas of one role in disaggregated serving: their number, and the layout of each."""

    workers: int = 1
    tp: int = 1
    pp: int = 1
    attention_dp: int = 1
    moe_tp: int | None = None
    moe_ep: int = 1


class OperatingPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model on a device with a workload in a closed loop.

    Dtypes None: as stored in the checkpoint. `cached`: prompt tokens found in the prefix cache.
    `num_speculative_tokens` tokens are drafted per step, each accepted with probability
    `acceptance`; `draft_model` runs on the same devices (None: prompt lookup, free of cost).

    `attention_dp` groups of `tp` devices hold different sequences and share the experts, which are
    spread `ep` ways whole and `moe_tp` ways by their matrices (None: over what `ep` leaves).
    `cp` devices for each of the `tp` divide the KV cache of every sequence; with `sp`, the `tp`
    devices each normalise a part of a step's rows.
    `backend`: the engine whose overheads are predicted (None: the mean of those known). With
    `prefill` and `decode`, prompts and answers are computed by separate pools, and `tp`, `pp`, `ep`
    and `attention_dp` are unused.

    `kv_eviction`: a policy of Ridgeline's engine that caps the tokens of a sequence in the cache.
    `tiers`: prompt tokens behind the cached ones that are found in tiers of the KV cache.
    `max_loras` adapters of `max_lora_rank` are loaded, and all of them used in every step.

    `what_if`: edits of the model's shape (`modelspec.what_if`). `speculative`: the speculation of
    a server, in place of `num_speculative_tokens`; `draft_share` of the sequences have a draft in a
    step. `beam_width`: rows of each request while it decodes. `embedding_bits`: of a packed
    embedding table. `quantization_method`: how `weight_dtype` is made, whose cost is predicted too.
    """

    model: str
    device: str
    isl: int
    osl: int
    batch: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    attention_dp: int = 1
    moe_tp: int | None = None
    cp: int = 1
    sp: bool = False
    backend: str | None = None
    prefill: Pool | None = None
    decode: Pool | None = None
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    cached: int = 0
    max_num_batched_tokens: int | None = None
    num_speculative_tokens: int = 0
    acceptance: float | None = None
    draft_model: str | None = None
    kv_eviction: KvEviction | None = None
    tiers: TierHits | None = None
    max_loras: int | None = None
    max_lora_rank: int = DEFAULT_RANK
    what_if: str | None = None
    speculative: Speculative | None = None
    draft_share: float = 1.0
    beam_width: int = 1
    embedding_bits: Literal[4, 8] | None = None
    quantization_method: str | None = None

    def tokens_per_step(self, machine: Replica) -> int:
        """`max_num_batched_tokens`, or the default of the engine that runs on the device."""
        return resolve_limits(machine, None, self.max_num_batched_tokens)[1]


def resolve_limits(machine: Replica, num_seqs: int | None, tokens: int | None) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens): as given, or the defaults of the engine on it."""
    is_ridgeline = machine.calibration is not None
    return (
        num_seqs or (ENGINE_NUM_SEQS if is_ridgeline else MAX_NUM_SEQS),
        tokens or (ENGINE_TOKENS if is_ridgeline else MAX_NUM_BATCHED_TOKENS),
    )


def validate_point(point: OperatingPoint) -> None:
    """Raise BadInput for a number out of range."""
    if (point.prefill is None) != (point.decode is None):
        raise BadInput(
            "disaggregated serving needs both pools",
            value="prefill" if point.decode is None else "decode",
            fix="give prefill and decode, or neither",
        )
    pools = [pool for pool in (point.prefill, point.decode) if pool is not None]
    if any(pool.workers < 1 for pool in pools):
        raise BadInput("a pool needs workers", value=0, limit=">= 1")
    counts = ("isl", "osl", "batch", "max_num_batched_tokens", "max_loras", "max_lora_rank")
    for name in (*counts, "beam_width"):
        value = getattr(point, name)
        if value is not None and value < 1:
            raise BadInput(f"{name} must be positive", value=value, limit=">= 1")
    if not 0 <= point.draft_share <= 1:
        raise BadInput("draft_share must be a share", value=point.draft_share, limit="0..1")
    _check_beams(point)
    if not 0 <= point.cached < point.isl:
        raise BadInput("cached must be below isl", value=point.cached, limit=f"0..{point.isl - 1}")
    if point.tiers is not None:
        point.tiers.check()
        if point.cached + point.tiers.tokens >= point.isl:
            raise BadInput(
                "tokens in the prefix cache and its tiers must be below isl",
                value=point.cached + point.tiers.tokens,
                limit=f"0..{point.isl - 1}",
            )


def _check_beams(point: OperatingPoint) -> None:
    """Raise BadInput for what beam search is not combined with."""
    if point.beam_width == 1:
        return
    others = {
        "drafts": point.speculative is not None or point.num_speculative_tokens > 0,
        "KV eviction": point.kv_eviction is not None,
        "separate pools": point.prefill is not None,
    }
    for name, is_set in others.items():
        if is_set:
            raise BadInput(
                f"beam search cannot be combined with {name}",
                value=f"beam_width {point.beam_width}",
                fix="leave one of them out",
            )


def check_speculative(point: OperatingPoint) -> None:
    """Raise BadInput for options that say again what the speculative config says."""
    for name in ("num_speculative_tokens", "draft_model"):
        if getattr(point, name):
            raise BadInput(
                f"{name} is a key of the speculative config",
                value=getattr(point, name),
                fix=f"leave {name} out",
            )
