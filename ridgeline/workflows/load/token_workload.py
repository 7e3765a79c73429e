"""The load of a model that has no tokenizer because its weights are random."""

from __future__ import annotations

import msgspec

from ridgeline.config.load import BenchOptions
from ridgeline.config.settings import Settings
from ridgeline.modelspec.checkpoints.locate import is_dummy
from ridgeline.records.progress import Caution, Observer
from ridgeline.workflows.targets import Target

TEXT_WORKLOAD = "chat-and-code"
TOKEN_WORKLOAD = "synthetic:input=512,output=128"


def workload_for(model: str, workload: str) -> str:
    """The workload; prompts of random token ids in place of the default's texts for a
    `dummy:SHAPE`."""
    return TOKEN_WORKLOAD if is_dummy(model) and workload == TEXT_WORKLOAD else workload


def load_for(options: BenchOptions, target: Target, observer: Observer) -> BenchOptions:
    """The options, with the workload that the target can take; says so if it is another one."""
    if not isinstance(target, Settings) or options.input_len is not None:
        return options
    workload = workload_for(target.model, options.workload)
    if workload != options.workload:
        observer(Caution(text=note(target.model, workload)))
    return msgspec.structs.replace(options, workload=workload)


def note(model: str, workload: str) -> str:
    """That the default workload was replaced, in one sentence."""
    return f"{model} has no tokenizer, so the prompts are random token ids: --workload {workload}"
