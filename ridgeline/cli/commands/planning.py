"""The commands that need no hardware: predict, plan, simulate, cost."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config import planning as config
from ridgeline.errors import BadInput

if TYPE_CHECKING:
    from ridgeline.hardware.catalogue import Accelerator
    from ridgeline.plan.cost.ownership import OwnedDevice, SpotDevice
    from ridgeline.plan.step_time.predict import OperatingPoint

SOME_FAILED = 2


def predict(call: Invocation) -> int:
    """`ridgeline predict`: one operating point, or a file of them."""
    from rich.console import Console

    from ridgeline.cli.render.planning.predict import prediction_table
    from ridgeline.modelspec.families.shapes import known_shapes
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.planning.device_catalogue import read_catalogue
    from ridgeline.workflows.planning.predict import predict_point

    options = call.read(config.PredictOptions)
    out = Console(highlight=False)
    if options.list_models:
        out.print("models:       " + " ".join(known_shapes()))
        out.print(
            "accelerators: " + " ".join(read_catalogue(options.catalogue, options.calibration))
        )
        return 0
    if options.input is not None:
        rows = read_catalogue(options.catalogue, options.calibration)
        return 0 if predict_file(options.input, options.output, rows) else SOME_FAILED
    result = predict_point(
        point_of(options), catalogue=options.catalogue, calibration=options.calibration
    )
    if options.json:
        print(json_line(result.to_dict()))
    else:
        out.print(prediction_table(result))
    return 0


def point_of(options: config.PredictOptions) -> OperatingPoint:
    """The operating point that the options describe."""
    from ridgeline.plan.step_time.predict import OperatingPoint

    return OperatingPoint(
        model=options.model or "",
        device=options.accelerator or "",
        isl=options.input_len,
        osl=options.output_len,
        batch=options.max_concurrency,
        tp=options.tensor_parallel_size,
        pp=options.pipeline_parallel_size,
        ep=options.expert_parallel_size,
        weight_dtype=options.quantization,
        kv_dtype=options.kv_cache_dtype,
        cached=options.cached_tokens,
        max_num_batched_tokens=options.max_num_batched_tokens,
        num_speculative_tokens=options.num_speculative_tokens,
        acceptance=options.acceptance,
        draft_model=options.draft_model,
    )


def predict_file(source: str, output: Path | None, rows: dict[str, Accelerator]) -> bool:
    """Predict every line of a JSONL file (`-`: stdin); False if a line could not be predicted."""
    from ridgeline.plan.step_time.predict import predict as predict_point
    from ridgeline.plan.step_time.predict import predict_lines
    from ridgeline.report.files import write_file
    from ridgeline.report.json_line import json_line

    failed = False

    def answers(points: Iterable[str]) -> Iterator[str]:
        nonlocal failed
        for answer in predict_lines(points, lambda point: predict_point(point, rows)):
            failed |= "error" in answer
            yield json_line(answer)

    if source == "-":
        points: Iterable[str] = sys.stdin
    else:
        try:
            points = Path(source).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput("cannot read the points", value=source, fix=str(error)) from None
    if output is not None:
        write_file(output, (f"{line}\n".encode() for line in answers(points)))
    else:
        for line in answers(points):
            print(line)
    return not failed


def plan(call: Invocation) -> None:
    """`ridgeline plan`."""
    from rich.console import Console

    from ridgeline.cli.render.planning.plan import print_plan
    from ridgeline.plan.deploy.clusters import ManifestOptions
    from ridgeline.report.files import write_file
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.planning.plan import PlanRequest
    from ridgeline.workflows.planning.plan import plan as make_plan

    given = call.read(config.PlanOptions)
    place = ManifestOptions(
        cluster=given.cluster,
        image=given.image,
        ray_image=given.ray_image,
        node_label=given.node_label,
    )
    options = PlanRequest(
        model=given.model,
        workload=given.workload,
        isl=given.input_len,
        osl=given.output_len,
        rate=given.request_rate,
        cached=given.cached_share,
        slo=given.slo,
        devices=given.accelerator,
        weight_dtypes=given.quantization,
        kv_dtypes=given.kv_cache_dtype,
        budget=given.monthly_budget,
        price_per_hour=given.price_per_hour,
        accept_stale=given.accept_stale,
        max_devices=given.max_devices,
        max_model_len=given.max_model_len,
        catalogue=given.catalogue,
        calibration=given.calibration,
        manifests=given.manifests is not None,
        place=place,
    )
    result = make_plan(options)
    if given.html is not None:
        write_file(given.html, [result.to_html().encode()])
    if given.json:
        print(json_line(result.to_dict()))
    else:
        print_plan(result, Console(highlight=False))
    if given.manifests is not None:
        err = Console(highlight=False, stderr=True)
        for path in result.save_manifests(given.manifests):
            err.print(f"written: {path}", style="dim", markup=False, soft_wrap=True)
        left_out = {} if result.manifests is None else result.manifests.left_out
        for name, why in left_out.items():
            err.print(f"not written: {name}: {why}", style="yellow", markup=False, soft_wrap=True)


def simulate(call: Invocation) -> int:
    """`ridgeline simulate`: one run, several seeds, or a sweep."""
    from ridgeline.cli.commands.simulate import SimulationOutputs, run_simulation
    from ridgeline.workflows.planning.simulate import SimulationRequest

    given = call.read(config.SimulateOptions)
    options = SimulationRequest(
        model=given.model,
        device=given.accelerator,
        tp=given.tensor_parallel_size,
        ep=given.expert_parallel_size,
        weight_dtype=given.quantization,
        kv_dtype=given.kv_cache_dtype,
        replicas=given.replicas,
        decode_replicas=given.decode_replicas,
        router=given.router,
        workload=given.workload,
        isl=given.input_len,
        osl=given.output_len,
        rate=given.request_rate,
        num_prompts=given.num_prompts,
        replay_speed=given.replay_speed,
        batch_share=given.batch_share,
        off_peak=given.off_peak,
        num_speculative_tokens=given.num_speculative_tokens,
        acceptance=given.acceptance,
        slo=given.slo,
        max_num_seqs=given.max_num_seqs,
        max_num_batched_tokens=given.max_num_batched_tokens,
        prefix_caching=given.enable_prefix_caching,
        autoscale=given.autoscale,
        target_in_flight=given.target_in_flight,
        startup_s=given.startup_s,
        mtbf_s=given.mtbf_s,
        repair_s=given.repair_s,
        catalogue=given.catalogue,
        calibration=given.calibration,
        seed=given.seed,
        num_seeds=given.num_seeds,
        step_by_step=given.step_by_step,
    )
    outputs = SimulationOutputs(html=given.html, trace=given.trace, json=given.json)
    return run_simulation(options, outputs, given.sweep, given.num_workers)


def cost(call: Invocation) -> None:
    """`ridgeline cost`."""
    from rich.console import Console

    from ridgeline.cli.render.planning.cost import print_cost
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.planning.cost import CostRequest
    from ridgeline.workflows.planning.cost import cost as compare_cost

    given = call.read(config.CostOptions)
    options = CostRequest(
        model=given.model,
        device=given.accelerator,
        workload=given.workload,
        isl=given.input_len,
        osl=given.output_len,
        rate=given.request_rate,
        slo=given.slo,
        prefix=given.prefix_len,
        hit_rate=given.hit_rate,
        num_prefixes=given.num_prefixes,
        batch=given.batch_api,
        long_lived=given.long_lived,
        price_per_hour=given.price_per_hour,
        owned=owned_of(given),
        spot=spot_of(given),
        prices=given.prices,
        accept_stale=given.accept_stale,
        catalogue=given.catalogue,
        calibration=given.calibration,
    )
    result = compare_cost(options)
    if given.json:
        print(json_line(result.to_dict()))
    else:
        print_cost(result, Console(highlight=False))


def owned_of(given: config.CostOptions) -> OwnedDevice | None:
    """The price of owned devices, where one was given."""
    from ridgeline.plan.cost.ownership import OwnedDevice

    if given.owned_dollars is None:
        return None
    if given.watts is None:
        raise BadInput("--owned-dollars needs --watts", value=given.owned_dollars)
    return OwnedDevice(
        dollars=given.owned_dollars,
        years=given.owned_years,
        watts=given.watts,
        dollars_per_kwh=given.dollars_per_kwh,
        pue=given.pue,
    )


def spot_of(given: config.CostOptions) -> SpotDevice | None:
    """The price of spot devices, where one was given."""
    from ridgeline.plan.cost.ownership import SpotDevice

    if given.spot_price is None:
        return None
    return SpotDevice(
        price=given.spot_price,
        interruptions_per_hour=given.spot_interruptions,
        lost_s=given.spot_lost_s,
    )
