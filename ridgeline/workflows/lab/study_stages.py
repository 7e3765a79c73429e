"""The stages of the case study: what each adds to the one before, and the settings that do it.

Eager PyTorch comes first, then what the field does about its cost: fewer launches and passes over
memory (torch.compile, then Ridgeline's kernels and CUDA graphs), fewer bytes (INT8, INT4), and more
tokens per read of the weights (speculation).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ridgeline.config.settings import Speculative

Honesty = Literal["exact", "lossy"]


class StudyStage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage. `honesty`: whether its tokens are those of the first stage, but for rounding.

    `by_device`: settings that depend on the type of the device. Backends that are the point of a
    stage are named, so that a machine without them refuses the stage instead of replacing it.
    `same_tokens_as`: an earlier stage whose tokens it must repeat.
    """

    name: str
    title: str
    honesty: Honesty
    settings: Mapping[str, Any]
    by_device: Mapping[str, Mapping[str, Any]] = {}
    same_tokens_as: str = ""

    def settings_on(self, device_type: str) -> dict[str, Any]:
        """Its settings on "cpu" or "cuda"."""
        return {**self.settings, **self.by_device.get(device_type, {})}


def study_stages(speculative: Speculative) -> tuple[StudyStage, ...]:
    """All stages, in order; the last speculates as `speculative` says."""
    return (
        StudyStage(
            name="eager",
            title="PyTorch operators, one call each",
            honesty="exact",
            settings={"layer_backend": "torch", "attention_backend": "torch"},
        ),
        StudyStage(
            name="compile",
            title="torch.compile between the products; on a GPU with block tables, in CUDA graphs",
            honesty="exact",
            settings={"layer_backend": "compiled", "attention_backend": "torch"},
            by_device={"cuda": {"attention_backend": "tables"}},
        ),
        StudyStage(
            name="kernels",
            title="Ridgeline's kernels; on a GPU in CUDA graphs",
            honesty="exact",
            settings={},
            by_device={
                "cpu": {"layer_backend": "native", "attention_backend": "native"},
                "cuda": {"layer_backend": "triton", "attention_backend": "triton"},
            },
        ),
        StudyStage(
            name="int8",
            title="INT8 weights",
            honesty="lossy",
            settings={"quantization": "int8"},
        ),
        StudyStage(
            name="int4",
            title="INT4 weights",
            honesty="lossy",
            settings={"quantization": "int4"},
        ),
        StudyStage(
            name="speculation",
            title=f"INT4 weights and {speculative.method} drafts",
            honesty="lossy",
            settings={"quantization": "int4", "speculative_config": speculative},
            same_tokens_as="int4",
        ),
    )


STAGE_NAMES = tuple(stage.name for stage in study_stages(Speculative(method="ngram")))
