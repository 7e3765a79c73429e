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
from ridgeline.plan.simulate.answer_cache import QUESTION_TOKENS
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
    _check_answers(options)
    _check_pins(options)
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
    if options.response_cache_size is not None:
        raise _no_prompts(options)
    arrivals_s = _poisson_arrivals_s(options, len(lengths))
    return _requests(options, [(*pair, ()) for pair in lengths], arrivals_s)


def _recorded_requests(options: SimulateOptions, source: TraceWorkload) -> list[SimulatedRequest]:
    """A recording, with its own arrival times if `replay_speed` is given."""
    names_prompts = any(row.blocks for row in source.rows)
    if options.pinned_prefixes != 1 and names_prompts:
        raise BadInput(
            "--pinned-prefixes has no effect on prompts that are recorded",
            value=options.pinned_prefixes,
        )
    if options.response_cache_size is not None and not names_prompts:
        raise _no_prompts(options)
    rows = source.rows[: options.num_prompts]
    lengths = [(row.num_input, row.num_output, row.blocks) for row in rows]
    if options.replay_speed is None:
        return _requests(options, lengths, _poisson_arrivals_s(options, len(rows)))
    start_s = rows[0].at_s
    return _requests(
        options, lengths, [(row.at_s - start_s) / options.replay_speed for row in rows]
    )


def _no_prompts(options: SimulateOptions) -> BadInput:
    return BadInput(
        "--response-cache-size needs recorded traffic that says which prompts are equal",
        value=options.workload,
        fix="use --workload mooncake:FILE, or give the share: --response-cache-share",
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
        ("--background-tokens", options.background_tokens),
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
    requests = [
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
    return _with_answers(options, _with_pins(options, requests))


def _with_answers(
    options: SimulateOptions, requests: list[SimulatedRequest]
) -> list[SimulatedRequest]:
    """The requests, of which caches answer a share that the seed chooses, or what was sent before.

    Those that are compared with earlier questions, and are not answered exactly, are embedded:
    this many more prompt tokens.
    """
    exact, similar = options.response_cache_share, options.semantic_cache_share
    if options.response_cache_size is not None:
        known: dict[tuple[int, int, tuple[int, ...]], int] = {}
        for i, request in enumerate(requests):
            if len(request.prefix) * request.prefix_block < request.num_prompt:
                continue  # the end of the prompt is not recorded: it may differ
            same = (request.num_prompt, request.num_output, request.prefix)
            answer = known.setdefault(same, i)
            requests[i] = msgspec.structs.replace(request, answer=answer)
        return requests
    if not exact and not similar:
        return requests
    question = (options.question_len or QUESTION_TOKENS) if similar else 0
    draws = np.random.default_rng(options.seed + 2).random(len(requests)).tolist()
    for i, (request, draw) in enumerate(zip(requests, draws, strict=True)):
        if request.background:
            continue
        if draw < exact:
            requests[i] = msgspec.structs.replace(request, answered=True)
        elif draw < exact + similar:
            requests[i] = msgspec.structs.replace(request, answered=True, question=question)
        else:
            num_prompt = request.num_prompt + question
            requests[i] = msgspec.structs.replace(request, num_prompt=num_prompt)
    return requests


def _with_pins(
    options: SimulateOptions, requests: list[SimulatedRequest]
) -> list[SimulatedRequest]:
    """The requests with the prefixes that they pin; those of a recording have their own."""
    if not options.pinned_len:
        return requests
    draws = np.random.default_rng(options.seed + 3).integers(
        options.pinned_prefixes, size=len(requests)
    )
    return [
        msgspec.structs.replace(request, pinned=options.pinned_len)
        if request.prefix
        else msgspec.structs.replace(
            request,
            pinned=options.pinned_len,
            prefix=(int(number),),
            prefix_block=options.pinned_len,
        )
        for request, number in zip(requests, draws, strict=True)
    ]


def _check_answers(options: SimulateOptions) -> None:
    """Raise BadInput for options of the response cache that contradict each other."""
    shares = options.response_cache_share + options.semantic_cache_share
    if shares > 1:
        raise BadInput(
            "--response-cache-share and --semantic-cache-share exceed all requests",
            value=f"{shares:g}",
            limit="1 together",
        )
    if options.question_len is not None and not options.semantic_cache_share:
        raise BadInput(
            "--question-len has no effect without --semantic-cache-share",
            value=options.question_len,
        )
    is_recorded = options.response_cache_size is not None
    if options.response_cache_ttl is not None and not is_recorded:
        raise BadInput(
            "--response-cache-ttl has no effect without --response-cache-size",
            value=options.response_cache_ttl,
        )
    if is_recorded and shares:
        raise BadInput(
            "--response-cache-size finds the answers that repeat in a recording, and "
            "--response-cache-share gives their share",
            value=f"{shares:g}",
            fix="leave one of them out",
        )
    if (is_recorded or shares) and options.decode_replicas:
        raise BadInput(
            "a response cache cannot be combined with --decode-replicas: no replica makes a whole "
            "answer",
            fix="leave one of them out",
        )


def _check_pins(options: SimulateOptions) -> None:
    """Raise BadInput for options of pinned prefixes that would have no effect."""
    if not options.pinned_len:
        for flag, value, default in (
            ("--pinned-prefixes", options.pinned_prefixes, 1),
            ("--prefix-pin-share", options.prefix_pin_share, None),
        ):
            if value != default:
                raise BadInput(f"{flag} has no effect without --pinned-len", value=value)
    elif not options.enable_prefix_caching:
        raise BadInput(
            "--pinned-len has no effect without --enable-prefix-caching", value=options.pinned_len
        )


def _deadline_s(options: SimulateOptions, arrival_s: float) -> float | None:
    """Requests that arrive in the same hundredth of the window are one batch, due with its
    first."""
    window_s = options.completion_window
    if window_s is None:
        return None
    step_s = window_s / BATCHES_PER_WINDOW
    return arrival_s // step_s * step_s + window_s
