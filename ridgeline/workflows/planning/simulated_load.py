"""The requests of a simulation: recorded traffic, or synthetic lengths under Poisson arrivals."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ridgeline.config.planning import SimulateOptions
from ridgeline.config.units import MAX_REQUESTS
from ridgeline.errors import BadInput
from ridgeline.measure.workload import parse_workload
from ridgeline.measure.workload.traces import MOONCAKE_BLOCK, TraceWorkload
from ridgeline.plan.simulate.further_models import FurtherModel
from ridgeline.plan.simulate.off_peak import OffPeak
from ridgeline.plan.simulate.records import SimulatedRequest
from ridgeline.workflows.load.workload_lengths import ISL, OSL, workload_lengths
from ridgeline.workflows.planning.pack import read_model_rows

BATCHES_PER_WINDOW = 100
Lengths = tuple[int, int, tuple[int, ...]]
"""Prompt tokens, output tokens, and the ids of the prompt's shared leading blocks."""


def requests_of(options: SimulateOptions) -> list[SimulatedRequest]:
    """All requests in order of arrival. Raises BadInput if the options contradict each other."""
    requests = _requests_of_model(options)
    models = read_further_models(options)
    if not models:
        return requests
    named = [msgspec.structs.replace(request, model=options.model) for request in requests]
    for number, model in enumerate(models, 1):
        named += _further_requests(options, model, requests[-1].at_s, number)
    return sorted(named, key=lambda request: request.at_s)


def read_further_models(options: SimulateOptions) -> list[FurtherModel]:
    """The rows of `--further-models`; [] without it. Raises BadInput if they cannot be read."""
    path = options.further_models
    return [] if path is None else read_model_rows(path, FurtherModel)


def _further_requests(
    options: SimulateOptions, model: FurtherModel, until_s: float, number: int
) -> list[SimulatedRequest]:
    """The requests of a further model, Poisson arrivals until `until_s`."""
    rng = np.random.default_rng((options.seed, number))
    arrivals_s: list[float] = []
    at_s = float(rng.exponential(1 / model.rate))
    while at_s <= until_s:
        arrivals_s.append(at_s)
        at_s += float(rng.exponential(1 / model.rate))
    if len(arrivals_s) > MAX_REQUESTS:
        raise BadInput(
            "--further-models makes too many requests",
            value=f"{len(arrivals_s):,} of {model.model}",
            limit=f"{MAX_REQUESTS:,}",
        )
    slo = options.parsed_slo
    return [
        SimulatedRequest(
            at_s=arrival_s,
            num_prompt=model.isl,
            num_output=model.osl,
            session=f"{model.model} {i}",
            model=model.model,
            ttft_slo_s=None if slo is None else slo.ttft_s,
        )
        for i, arrival_s in enumerate(arrivals_s)
    ]


def _requests_of_model(options: SimulateOptions) -> list[SimulatedRequest]:
    """The requests of the command's own model."""
    if options.workload is not None:
        source = parse_workload(options.workload)
        if isinstance(source, TraceWorkload):
            return _recorded_requests(options, source)
        lengths = workload_lengths(options.workload, options.num_prompts, options.seed)
    else:
        lengths = [(options.input_len or ISL, options.output_len or OSL)] * options.num_prompts
    if options.replay_speed is not None:
        raise BadInput("--replay-speed needs recorded traffic", value=options.workload)
    arrivals_s = _poisson_arrivals_s(options, len(lengths))
    return _requests(options, [(*pair, ()) for pair in lengths], arrivals_s)


def _recorded_requests(options: SimulateOptions, source: TraceWorkload) -> list[SimulatedRequest]:
    """A recording, with its own arrival times if `replay_speed` is given."""
    rows = source.rows[: options.num_prompts]
    lengths = [(row.num_input, row.num_output, row.blocks) for row in rows]
    if options.replay_speed is None:
        return _requests(options, lengths, _poisson_arrivals_s(options, len(rows)))
    start_s = rows[0].at_s
    return _requests(
        options, lengths, [(row.at_s - start_s) / options.replay_speed for row in rows]
    )


def _poisson_arrivals_s(options: SimulateOptions, count: int) -> list[float]:
    if not options.request_rate > 0:
        raise BadInput("the request rate must be positive", value=options.request_rate)
    gaps_s = np.random.default_rng(options.seed).exponential(1 / options.request_rate, count)
    return [float(arrival_s) for arrival_s in np.cumsum(gaps_s)]


def _requests(
    options: SimulateOptions, lengths: Sequence[Lengths], arrivals_s: Sequence[float]
) -> list[SimulatedRequest]:
    """`batch_share` of the requests, chosen by the seed, run in the background.

    With an off-peak window, those are held back until it opens.
    """
    window = None if options.off_peak is None else OffPeak.parse(options.off_peak)
    for name, value in (
        ("--off-peak", options.off_peak),
        ("--completion-window", options.completion_window),
    ):
        if value is not None and not options.batch_share:
            raise BadInput(f"{name} has no effect without --batch-share", value=value)
    if options.completion_window is not None:
        window = None  # the batch store keeps it
    draws = np.random.default_rng(options.seed + 1).random(len(lengths))
    background = (draws < options.batch_share).tolist()
    slo = options.parsed_slo
    return [
        SimulatedRequest(
            at_s=arrival_s,
            num_prompt=num_prompt,
            num_output=num_output,
            prefix=blocks,
            prefix_block=MOONCAKE_BLOCK,
            session=str(i),
            background=is_background,
            kind="batch" if is_background else "",
            not_before_s=window.opens_s(arrival_s) if is_background and window else 0.0,
            deadline_s=_deadline_s(options, arrival_s) if is_background else None,
            ttft_slo_s=None if slo is None else slo.ttft_s,
        )
        for i, ((num_prompt, num_output, blocks), arrival_s, is_background) in enumerate(
            zip(lengths, arrivals_s, background, strict=True)
        )
    ]


def _deadline_s(options: SimulateOptions, arrival_s: float) -> float | None:
    """Requests that arrive in the same hundredth of the window are one batch, due with its
    first."""
    window_s = options.completion_window
    if window_s is None:
        return None
    step_s = window_s / BATCHES_PER_WINDOW
    return arrival_s // step_s * step_s + window_s
