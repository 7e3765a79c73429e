"""`ridgeline diagnose MODEL --profile`: the operators of an engine's steps against their bounds.

The workload says what is profiled: one prompt of its median length, then `--max-concurrency`
sequences (8 where nothing is said) that decode half-way through their median answer.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from ridgeline.cli.render.diagnose_html import profile_page
from ridgeline.cli.render.profile import ceilings_line, heading, table_lines
from ridgeline.config.settings import Settings
from ridgeline.diagnose.chart import roofline_text
from ridgeline.diagnose.profile import Profile, judge
from ridgeline.errors import BadInput, UserError
from ridgeline.measure.bench import BenchOptions, check, workload_of
from ridgeline.measure.workload import Chat, LoadRequest, plain_chat
from ridgeline.report.files import write_file
from ridgeline.report.json_line import json_line

if TYPE_CHECKING:
    from ridgeline.engine.profiling.profile import ProfileOptions
    from ridgeline.engine.tokenization import Tokenizer

SAMPLE, SEQUENCES = 200, 8


def command(
    options: BenchOptions,
    settings: Settings,
    as_json: bool,
    html: Path | None,
    console: Console | None = None,
) -> int:
    """Profile, print, write. Raises UserError where the workload does not fit the engine."""
    check(options)
    found = profiled(options, settings)
    if as_json:
        print(json_line(as_built(found)))
    else:
        show(found, console or Console(highlight=False, soft_wrap=True))
    if html is not None:
        write_file(html, [profile_page(found).encode()])
    return 0


def profiled(options: BenchOptions, settings: Settings) -> Profile:
    """Open an engine's parts, run the steps, hold them against ceilings measured around them."""
    from ridgeline.engine.build import assemble
    from ridgeline.engine.config import resolve
    from ridgeline.engine.profiling.profile import check as check_fits
    from ridgeline.engine.profiling.profile import profile
    from ridgeline.engine.tokenization import load_tokenizer
    from ridgeline.hardware.ceilings import measure_ceilings

    Console(stderr=True).print(f"loading {settings.model} …", style="dim", markup=False)
    resolved = resolve(settings)
    lengths = _lengths(options, load_tokenizer(resolved.model), resolved.max_num_seqs)
    check_fits(resolved, lengths)
    parts = assemble(resolved)
    before = measure_ceilings(resolved.num_threads)
    phases = profile(parts, resolved, lengths)
    ceilings = before.best_of(measure_ceilings(resolved.num_threads))
    return judge(
        f"{settings.model}, {resolved.layer_backend} layers", phases, resolved.spec, ceilings
    )


def _lengths(options: BenchOptions, tokenizer: Tokenizer, seats: int) -> ProfileOptions:
    from ridgeline.engine.profiling.profile import ProfileOptions

    requests = list(workload_of(options).sample(SAMPLE, options.seed))
    prompt = round(statistics.median(_tokens(each, tokenizer) for each in requests))
    answer = statistics.median(each.max_tokens for each in requests)
    batch = options.max_concurrency or min(SEQUENCES, seats)
    context = prompt + round(answer / 2)
    return ProfileOptions(prompt=prompt, batch=batch, context=context, seed=options.seed)


def _tokens(request: LoadRequest, tokenizer: Tokenizer) -> int:
    prompt = request.prompt
    if isinstance(prompt, tuple):
        return len(prompt)
    try:
        return len(tokenizer.encode(plain_chat(prompt) if isinstance(prompt, Chat) else prompt))
    except UserError as error:
        raise BadInput(
            "this workload is text, and the model takes token ids only",
            value=request.kind,
            limit=error.what,
            fix="--random-input-len 256 --random-output-len 128",
        ) from None


def as_built(found: Profile) -> object:
    """For JSON: the records with what follows from them."""
    built = msgspec.to_builtins(found)
    for table, phase in zip(built["phases"], found.phases, strict=True):
        table |= {"bound_s": phase.bound_s, "timing_cost": phase.timing_cost}
        for row, operator in zip(table["rows"], phase.rows, strict=True):
            row["of_bound"] = operator.of_bound
    return built


def show(found: Profile, out: Console) -> None:
    """A table per phase, the roofline, and what stands out."""
    out.print(found.target, style="bold", markup=False)
    out.print(ceilings_line(found), style="dim", markup=False)
    for phase in found.phases:
        out.print()
        out.print(heading(phase), style="bold", markup=False)
        first, *rest = table_lines(phase)
        out.print(first, style="dim", markup=False)
        for line in rest:
            out.print(line, markup=False)
    out.print()
    for line in roofline_text(found.points, found.peaks):
        out.print(line, markup=False, no_wrap=True, crop=False)
    out.print()
    for sentence in found.stands_out:
        out.print(f"- {sentence}", markup=False)
