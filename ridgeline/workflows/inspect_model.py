"""Describe a model: its arithmetic, and the integrity of a quantised checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.engine.generation_config import read_sampling_defaults
from ridgeline.engine.tokenization import (
    HfTokenizer,
    NoTokenizer,
    check_tokenizer,
    load_tokenizer,
)
from ridgeline.errors import BadInput
from ridgeline.hub.download import config_folder
from ridgeline.modelspec.checkpoints.gguf_header import is_gguf
from ridgeline.modelspec.checkpoints.json_files import read_json
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import is_dummy, model_path
from ridgeline.modelspec.checkpoints.packed_config import KEY
from ridgeline.modelspec.checkpoints.planning import (
    config_planning_spec,
    is_only_planned,
    load_planning_spec,
)
from ridgeline.modelspec.cost.inspect import InspectRow, LayerGroup, inspect_table, layer_groups
from ridgeline.modelspec.cost.ranks import RankTable, rank_table
from ridgeline.modelspec.families.shapes import planning_row, shape_table
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import linears
from ridgeline.modelspec.what_if import KvComparison, compare_kv
from ridgeline.records import SamplingDefaults
from ridgeline.report.result import Result

if TYPE_CHECKING:
    from ridgeline.engine.checkpoints.self_check import LayerCheck


class ModelInspection(Result, frozen=True, kw_only=True):
    """Parameters, FLOPs, bytes and intensity in `rows`; `layers` groups those that are alike.

    `default_sampling`: that of requests which leave it out, from generation_config.json.
    `tokenizer`: its size and BOS, or why only token ids are accepted. `self_check`: one entry per
    layer of a quantised checkpoint, empty for other models. `note` says what was not read.
    `what_if`: the KV cache of the model and of an edited one, if that was asked. `layout`: what
    each rank of a parallel layout holds, likewise.
    """

    model: str
    rows: tuple[InspectRow, ...]
    layers: tuple[LayerGroup, ...]
    tokenizer: str
    default_sampling: SamplingDefaults
    self_check: tuple[LayerCheck, ...]
    note: str = ""
    what_if: KvComparison | None = None
    layout: RankTable | None = None

    @property
    def is_sound(self) -> bool:
        """Whether no layer has a fault."""
        return not any(check.faults for check in self.self_check)


def inspect_model(
    model: str,
    *,
    against: str | None = None,
    what_if: str | None = None,
    layout: str | None = None,
) -> ModelInspection:
    """Describe `model`; a quantised checkpoint is read and checked layer by layer.

    `against`: the original of a quantised model, to measure the error of its weights. `what_if`:
    edits of its attention (`modelspec.what_if`), to compare the KV caches. `layout`: sizes of a
    parallel layout (`modelspec.cost.ranks`), to show its ranks. Of a published shape, a
    config.json, a family that the engine does not run, and a repository of the Hugging Face Hub
    that is not downloaded, only the fields of config.json are read: nothing is checked then. Raises
    BadModel, also for a tokenizer that is larger than the model's vocabulary, BadInput for an
    original of a model that is not quantised, CannotRun for a layout that does not suit the model,
    and DownloadFailed.
    """
    if against is None and planning_row(model) and not Path(model).exists():
        note = "a published shape, without weights"
        note += f"; dummy:{model} has random ones" if model in shape_table() else ""
        return _inspect_config(load_planning_spec(model), note, what_if, layout)
    folder = config_folder(model) if against is None else None
    if folder is not None:
        note = f"only config.json was read; ridgeline pull {model} downloads the rest"
        return _inspect_config(config_planning_spec(folder, model), note, what_if, layout)
    if against is None and is_only_planned(model):
        planned = load_planning_spec(model)
        note = "only config.json was read"
        if planned.unsupported:
            note += f"; the engine does not run this family: {planned.unsupported}"
        return _inspect_config(planned, note, what_if, layout)
    spec = load_spec(model)
    return ModelInspection(
        model=spec.name,
        rows=tuple(inspect_table(spec)),
        layers=tuple(layer_groups(spec)),
        tokenizer=describe_tokenizer(model, spec.vocab_size),
        default_sampling=read_sampling_defaults(model),
        self_check=_self_check(model, spec, against),
        what_if=None if what_if is None else compare_kv(spec, what_if),
        layout=None if layout is None else rank_table(spec, layout),
    )


def _inspect_config(
    spec: ModelSpec, note: str, what_if: str | None, layout: str | None
) -> ModelInspection:
    """What config.json alone says."""
    return ModelInspection(
        model=spec.name,
        rows=tuple(inspect_table(spec)),
        layers=tuple(layer_groups(spec)),
        tokenizer="not read",
        note=note,
        default_sampling=SamplingDefaults(),
        self_check=(),
        what_if=None if what_if is None else compare_kv(spec, what_if),
        layout=None if layout is None else rank_table(spec, layout),
    )


def describe_tokenizer(model: str, vocab_size: int) -> str:
    """The tokenizer in a few words, checked against the model's vocabulary. Raises BadModel."""
    tokenizer = load_tokenizer(model)
    if isinstance(tokenizer, NoTokenizer):
        return f"none: token ids only, because {tokenizer.reason}"
    check_tokenizer(tokenizer, vocab_size)
    assert isinstance(tokenizer, HfTokenizer)
    size = tokenizer.inner.get_vocab_size(with_added_tokens=True)
    first = tokenizer.encode("")
    start = tokenizer.decode(first, skip_special_tokens=False)
    return f"{size:,} tokens: " + (f"a text begins with {start}" if first else "no BOS")


def is_quantized(model: str) -> bool:
    """Whether the checkpoint says that it is quantised."""
    return is_gguf(model) or KEY in read_json(model_path(model) / "config.json")


def _self_check(model: str, spec: ModelSpec, against: str | None) -> tuple[LayerCheck, ...]:
    has_weights = not is_dummy(model)
    quantized = any(linear.format.kind != "dense" for linear in linears(spec).values())
    if has_weights and (quantized or is_quantized(model)):
        from ridgeline.engine.checkpoints.self_check import check_layers

        return tuple(check_layers(model, against))
    if against is not None:
        raise BadInput("--against needs a quantised model", value=model, fix="leave --against out")
    return ()
