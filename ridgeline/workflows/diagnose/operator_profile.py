"""Time every operator of an engine's prefill and decode steps against its bound.

The workload determines what is profiled: one prompt of its median length, then a batch of sequences
(8 by default) that are half-way through their median output.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from ridgeline.config.load import BenchOptions
from ridgeline.config.settings import Settings
from ridgeline.diagnose.roofline.operators import Profile, judge
from ridgeline.errors import BadInput, UserError
from ridgeline.measure.bench_options import check_options as check_bench_options
from ridgeline.measure.bench_options import workload_of
from ridgeline.measure.workload import ChatPrompt, LoadRequest, plain_chat
from ridgeline.records.progress import Observer, silent, stage
from ridgeline.report.json_line import plain
from ridgeline.report.result import Result
from ridgeline.workflows.diagnose.diagnosis_page import profile_page
from ridgeline.workflows.load.token_workload import load_for

if TYPE_CHECKING:
    from ridgeline.engine.profiling.profile import ProfileOptions
    from ridgeline.engine.tokenization import Tokenizer

NUM_SAMPLES, NUM_SEQUENCES = 200, 8


class ProfileResult(Result, frozen=True, kw_only=True):
    """The operators of prefill and decode steps, with their bounds."""

    profile: Profile

    def to_dict(self) -> dict[str, Any]:
        """The profile, and the bounds that follow from it."""
        result: dict[str, Any] = plain(self.profile)
        for table, phase in zip(result["phases"], self.profile.phases, strict=True):
            table |= {"bound_s": phase.bound_s, "timing_cost": phase.timing_cost}
            for row, operator in zip(table["rows"], phase.rows, strict=True):
                row["of_bound"] = operator.of_bound
        return result

    def to_html(self) -> str:
        """A table and a roofline per phase."""
        return profile_page(self.profile)


def profile_operators(
    options: BenchOptions, settings: Settings, observer: Observer = silent
) -> ProfileResult:
    """Profile the steps of an engine with these settings under the workload of the options.

    The ceilings are measured before and after, and the better of the two is used. Raises UserError
    if the workload does not fit the engine.
    """
    from ridgeline.engine.build import assemble
    from ridgeline.engine.config import resolve
    from ridgeline.engine.profiling.profile import check_options, profile
    from ridgeline.engine.tokenization import load_tokenizer
    from ridgeline.hardware.ceilings import ceilings_of

    check_bench_options(options)
    options = load_for(options, settings, observer)
    with stage(observer, f"loading {settings.model}"):
        resolved = resolve(settings)
        lengths = _lengths(options, load_tokenizer(resolved.model), resolved.max_num_seqs)
        check_options(resolved, lengths)
        parts = assemble(resolved)
    with stage(observer, "profiling"):
        before = ceilings_of(resolved.device, resolved.num_threads)
        phases = profile(parts, resolved, lengths)
        ceilings = before.best_of(ceilings_of(resolved.device, resolved.num_threads))
    name = f"{settings.model}, {resolved.layer_backend} layers"
    return ProfileResult(profile=judge(name, phases, resolved.spec, ceilings))


def _lengths(options: BenchOptions, tokenizer: Tokenizer, max_num_seqs: int) -> ProfileOptions:
    from ridgeline.engine.profiling.profile import ProfileOptions

    requests = list(workload_of(options).sample(NUM_SAMPLES, options.seed))
    prompt = round(statistics.median(_prompt_tokens(request, tokenizer) for request in requests))
    output = statistics.median(request.max_tokens for request in requests)
    batch = options.max_concurrency or min(NUM_SEQUENCES, max_num_seqs)
    context = prompt + round(output / 2)
    return ProfileOptions(prompt=prompt, batch=batch, context=context, seed=options.seed)


def _prompt_tokens(request: LoadRequest, tokenizer: Tokenizer) -> int:
    prompt = request.prompt
    if isinstance(prompt, tuple):
        return len(prompt)
    try:
        return len(
            tokenizer.encode(plain_chat(prompt) if isinstance(prompt, ChatPrompt) else prompt)
        )
    except UserError as error:
        raise BadInput(
            "this workload is text, and the model takes token ids only",
            value=request.kind,
            limit=error.what,
            fix="--input-len 256 --output-len 128",
        ) from None
