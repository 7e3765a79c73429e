"""Tensors of a checkpoint that may be left unread, each with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ridgeline.modelspec.model import ModelSpec

HARMLESS_TENSORS: Mapping[str, str] = {
    "rotary_emb.inv_freq": "old checkpoints store the rotary frequencies, which follow from config",
    "rotary_emb.cos_cached": "a table of what follows from config",
    "rotary_emb.sin_cached": "a table of what follows from config",
    "vision_model.": "encodes images; only text is read",
    "audio_tower.": "encodes sound; only text is read",
    "embed_audio.": "projects sound into the text; only text is read",
    "embed_vision.": "projects images into the text; only text is read",
    "vision_tower.": "encodes images; only text is read",
    "image_newline": "stands between rows of an image; only text is read",
    "model.connector.": "projects images into the text; only text is read",
    "vision_encoder.": "encodes images; only text is read",
    "vision_projection.": "projects images into the text; only text is read",
    "mm_projector.": "projects images into the text; only text is read",
    "multi_modal_projector.": "projects images into the text; only text is read",
    ".k_scale": "scales keys of an FP8 KV cache; Ridgeline computes its own scales",
    ".v_scale": "scales values of an FP8 KV cache; Ridgeline computes its own scales",
    ".k_zero_point": "shifts keys of an 8-bit KV cache; Ridgeline's own has no zero-points",
    ".v_zero_point": "shifts values of an 8-bit KV cache; Ridgeline's own has no zero-points",
    ".kv_scale": "scales an FP8 KV cache; Ridgeline computes its own scales",
    ".q_scale": "scales queries for an FP8 KV cache",
    ".prob_scale": "scales attention weights for an FP8 KV cache",
    ".prob_output_scale": "scales attention weights for an FP8 KV cache",
    "proj.output_scale": "scales an FP8 KV cache; Ridgeline computes its own scales",
    "visual.": "encodes images and video; only text is read",
    "mtp.": "predicts several tokens at once; only the model itself is read",
}
"""Parts of the names of tensors that may be left unread, each with the reason."""


def unused_tensors(spec: ModelSpec) -> tuple[str, ...]:
    """Parts of names of tensors that are stored although the config leaves them without use."""
    keys = tuple(
        f"layers.{i}.self_attn.{key}_"
        for i, layer in enumerate(spec.layers)
        if layer.attention.shares_kv
        for key in ("k", "v")
    )
    altup = spec.layers[0].altup
    unscaled = altup is not None and not altup.scales_active
    return (*keys, "altup.correct_output_scale") if unscaled else keys


def prediction_layers(names: Iterable[str], num_layers: int) -> tuple[str, ...]:
    """Prefixes of the layers that predict a further token, which follow the model's own.

    DeepSeek-V3 and GLM-4.5 publish them (multi-token prediction, arXiv:2412.19437, section 2.2);
    their configs do not count them. An `eh_proj` marks one: other layers have none.
    """
    mark = ".eh_proj.weight"
    prefixes = [name.removesuffix(mark) for name in names if name.endswith(mark)]
    return tuple(
        f"{prefix}."
        for prefix in prefixes
        if (index := prefix.rpartition(".")[2]).isdigit() and int(index) >= num_layers
    )
