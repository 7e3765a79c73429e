"""Splits a prediction into terms: where the time of an output token and of the first one goes.

The terms are those that `predict` adds up, in the same order, so that their sums are its TPOT and
TTFT:

    TPOT   the parts of one decode step (weights, experts, LM head, attention, the engine's
           overheads, collectives), and what other clients' prompts add to a mean step; in
           disaggregated serving, the factor of the decode pool instead
    TTFT   the parts of the steps that compute the prompt, with the other clients' decodes in them,
           time outside the steps, and waits for other prompts

With speculation the decode step is the verification, divided by the tokens that it yields.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ridgeline.errors import RidgelineError
from ridgeline.hardware.catalogue import Accelerator, load_catalogue
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.predict import (
    Prediction,
    decode_pool_factor,
    decoding_sequences,
    loads_of,
    middle_of_answer,
    mixed_steps,
    replica_of,
    speculation_model,
    time_point,
)
from ridgeline.plan.step_time.replica import Replica, StepTerm

_TOLERANCE = 1e-6  # relative difference of a sum from the prediction


class TimeTerm(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of one term; `bound`: bandwidth or compute, where the term has one."""

    name: str
    ms: float
    bound: str = ""


class Waterfall(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of one predicted point, which add up to its TPOT and to its TTFT."""

    tpot: tuple[TimeTerm, ...]
    ttft: tuple[TimeTerm, ...]

    @property
    def tpot_ms(self) -> float:
        return sum(term.ms for term in self.tpot)

    @property
    def ttft_ms(self) -> float:
        return sum(term.ms for term in self.ttft)


def waterfall(
    point: OperatingPoint,
    prediction: Prediction,
    catalogue: Mapping[str, Accelerator] | None = None,
    *,
    measured: bool = False,
) -> Waterfall:
    """The terms of `prediction`, which `predict` has made of `point`.

    Raises RidgelineError if they do not add up to the prediction.
    """
    rows = load_catalogue() if catalogue is None else dict(catalogue)
    if point.prefill is None or point.decode is None:
        terms = waterfall_on(replica_of(point, rows, measured=measured), point)
    else:
        first, machine = (
            replica_of(point, rows, pool, measured=measured)
            for pool in (point.prefill, point.decode)
        )
        terms = _of_pools(point, first, machine)
    for name, total in (("tpot_ms", terms.tpot_ms), ("ttft_ms", terms.ttft_ms)):
        predicted = getattr(prediction, name)
        if not math.isclose(total, predicted, rel_tol=_TOLERANCE):
            raise RidgelineError(
                f"the terms of {name} add up to {total:.6f} where {predicted:.6f} is predicted"
            )
    return terms


def waterfall_on(machine: Replica, point: OperatingPoint) -> Waterfall:
    """The terms of a point on an existing replica; the point's own layout is ignored."""
    drafts = speculation_model(machine, point)
    at, decode = time_point(machine, point, drafts), decode_terms(machine, point)
    return Waterfall(
        tpot=_terms(decode, {"other clients' prompts": at.tpot_s}),
        ttft=_terms(prompt_terms(machine, point), _waits(machine, point, at.ttft_s, at.tpot_s)),
    )


def decode_terms(machine: Replica, point: OperatingPoint) -> dict[str, StepTerm]:
    """Seconds per token of a decode step of the whole batch, by term."""
    drafts = speculation_model(machine, point)
    batch, held = decoding_sequences(machine, point), middle_of_answer(point)
    if drafts is None:
        return machine.step_terms(((batch, 1, held),), batch)
    tokens, total = drafts.tokens_per_step, dict[str, StepTerm]()
    for step in drafts.steps(batch, held):
        for name, term in machine.step_terms(step.groups, step.num_sampled).items():
            known = total.get(name, StepTerm(0.0, 0.0, 0.0))
            total[name] = _sum(known, _scaled(term, step.weight / tokens))
    drafting_s = drafts.draft_s(machine, batch, held) / tokens
    return {**total, "drafts": StepTerm(0.0, 0.0, drafting_s)}


def prompt_terms(machine: Replica, point: OperatingPoint) -> dict[str, StepTerm]:
    """Seconds of the steps that compute a prompt which does not wait, by term."""
    mixed = mixed_steps(machine, point, speculation_model(machine, point))
    total: dict[str, StepTerm] = {}
    for groups, sampled in mixed.steps_of_prompt():
        for name, term in machine.step_terms(groups, sampled).items():
            known = total.get(name, StepTerm(0.0, 0.0, 0.0))
            total[name] = _sum(known, term)
    if mixed.copy_s:
        total["copies from KV tiers"] = StepTerm(0.0, 0.0, mixed.copy_s)
    taken_s = sum(term.seconds for term in total.values())
    longer_s = mixed.prompt_s - taken_s
    if longer_s > _TOLERANCE * taken_s:  # verifying drafts can take longer than a step of prompts
        total["decode steps, at least"] = StepTerm(0.0, 0.0, longer_s)
    if wait_s := loads_of(machine, point).wait_s:
        total["files of KV tiers"] = StepTerm(0.0, 0.0, wait_s)
    return total


def _waits(
    machine: Replica, point: OperatingPoint, prompt_s: float, tpot_s: float
) -> dict[str, float]:
    """Cumulative seconds from the prompt's steps to the first token in a closed loop."""
    eff = machine.efficiency
    clients = max(1.0, point.batch / machine.layout.num_attention)
    outside_s = prompt_s + eff.first_s
    others_s = outside_s + eff.together * prompt_s * (clients - 1) / 2
    return {
        "engine, per request": outside_s,
        "waiting for other prompts": others_s,
        "waiting for a step": eff.ttft_s(prompt_s, tpot_s, clients),
    }


def _of_pools(point: OperatingPoint, first: Replica, machine: Replica) -> Waterfall:
    assert point.prefill is not None and point.decode is not None
    prompt = msgspec.structs.replace(point, batch=1, osl=1)
    batch = math.ceil(point.batch / point.decode.workers)
    alone = msgspec.structs.replace(point, batch=batch, cached=point.isl - 1, tiers=None)
    decoding, eff = decode_terms(machine, alone), machine.efficiency
    step_s = sum(term.seconds for term in decoding.values())
    prompt_s = time_point(first, prompt).ttft_s
    clients = math.ceil(point.batch / point.prefill.workers)
    return Waterfall(
        tpot=_terms(
            decoding, {"factor of decode pools": step_s * decode_pool_factor(machine, point)}
        ),
        ttft=_terms(
            prompt_terms(first, prompt),
            {
                "engine and transfer": prompt_s + eff.pool_first_s,
                "waiting for other prompts": eff.pool_ttft_s(prompt_s, clients),
            },
        ),
    )


def _terms(parts: Mapping[str, StepTerm], then: Mapping[str, float]) -> tuple[TimeTerm, ...]:
    """The parts that take time, and the additions up to each of the cumulative seconds `then`."""
    terms = [
        TimeTerm(name=name, ms=term.seconds * 1000, bound=_bound(term))
        for name, term in parts.items()
    ]
    reached_s = sum(term.seconds for term in parts.values())
    for name, until_s in then.items():
        terms.append(TimeTerm(name=name, ms=(until_s - reached_s) * 1000))
        reached_s = until_s
    return tuple(_without_rounding(terms))


def _without_rounding(terms: Sequence[TimeTerm]) -> Iterator[TimeTerm]:
    total = sum(term.ms for term in terms)
    return (term for term in terms if abs(term.ms) > 1e-9 * total)


def _bound(term: StepTerm) -> str:
    if max(term.memory_s, term.compute_s) == 0:
        return ""
    return "bandwidth" if term.memory_s >= term.compute_s else "compute"


def _sum(first: StepTerm, second: StepTerm) -> StepTerm:
    return StepTerm(*(a + b for a, b in zip(first, second, strict=True)))


def _scaled(term: StepTerm, factor: float) -> StepTerm:
    return StepTerm(*(seconds * factor for seconds in term))
