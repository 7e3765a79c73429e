"""Parameters, bytes and FLOPs of a model, computed from its spec."""

from ridgeline.modelspec.cost.kv_cache import (
    has_states,
    kv_bytes,
    kv_bytes_per_token,
    layer_kv_bytes,
    state_bytes,
)
from ridgeline.modelspec.cost.kv_layout import KvLayout, held_kv_bytes, kv_layout
from ridgeline.modelspec.cost.parameters import (
    LARGE_PARAMS,
    layer_params,
    norm_params,
    num_active_params,
    num_params,
)
from ridgeline.modelspec.cost.step import (
    NO_WORK,
    CostModel,
    ExpertGroup,
    Shape,
    StepWork,
    WindowGroup,
    cost_model,
    decode_work,
    prefill_work,
    step_work,
    visible,
)
from ridgeline.modelspec.cost.weights import (
    resident_weight_bytes,
    shares_table,
    table_bytes,
    table_dtype,
    weight_bytes,
)

__all__ = [
    "LARGE_PARAMS",
    "NO_WORK",
    "CostModel",
    "ExpertGroup",
    "KvLayout",
    "Shape",
    "StepWork",
    "WindowGroup",
    "cost_model",
    "decode_work",
    "has_states",
    "held_kv_bytes",
    "kv_bytes",
    "kv_bytes_per_token",
    "kv_layout",
    "layer_kv_bytes",
    "layer_params",
    "norm_params",
    "num_active_params",
    "num_params",
    "prefill_work",
    "resident_weight_bytes",
    "shares_table",
    "state_bytes",
    "step_work",
    "table_bytes",
    "table_dtype",
    "visible",
    "weight_bytes",
]
