"""Flags of the commands that answer before anything is rented: predict, plan, simulate, cost."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli.commands.calibrate import calibrate
from ridgeline.cli.commands.pack import pack
from ridgeline.cli.params.load import WORKLOADS
from ridgeline.cli.params.planning import (
    KV,
    SHAPE,
    WEIGHTS,
    Acceptance,
    AcceptStale,
    BatchShare,
    Calibrated,
    Catalogue,
    Cluster,
    DecodeReplicas,
    Devices,
    Drafts,
    Image,
    Json,
    NodeLabel,
    OffPeakHours,
    RayImage,
    RouterName,
    Seats,
    Seeds,
    SharePrefixes,
    SpotInterruptions,
    SpotLost,
    SpotPrice,
    StepTokens,
    Sweep,
    Workers,
)

if TYPE_CHECKING:
    from ridgeline.hardware.catalogue import Accelerator


def add_plan_commands(app: typer.Typer) -> None:
    """Register them."""
    app.command()(calibrate)
    app.command()(predict)
    app.command()(plan)
    app.command()(simulate)
    app.command()(cost)
    app.command()(pack)


def predict(
    model: Annotated[str | None, typer.Argument(help=SHAPE, show_default=False)] = None,
    device: Annotated[str | None, typer.Option(help="An accelerator of the catalogue.")] = None,
    isl: Annotated[int, typer.Option(help="Prompt tokens.")] = 1024,
    osl: Annotated[int, typer.Option(help="Answer tokens.")] = 256,
    batch: Annotated[int, typer.Option(help="Requests in flight, in a closed loop.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor parallel devices.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    ep: Annotated[int, typer.Option(help="Devices that whole experts are spread over.")] = 1,
    weight_dtype: Annotated[str | None, typer.Option(help=WEIGHTS)] = None,
    kv_dtype: Annotated[str | None, typer.Option(help=KV)] = None,
    cached: Annotated[int, typer.Option(help="Prompt tokens that the prefix cache holds.")] = 0,
    max_num_batched_tokens: StepTokens = None,
    num_speculative_tokens: Drafts = 0,
    acceptance: Acceptance = None,
    draft_model: Annotated[
        str | None, typer.Option(help="What drafts, on the same devices (default: lookup, free).")
    ] = None,
    input: Annotated[
        str | None, typer.Option(help="JSONL of points; - reads stdin.", metavar="FILE")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write JSONL there, not to stdout.", metavar="FILE")
    ] = None,
    catalogue: Catalogue = None,
    calibration: Calibrated = None,
    list_models: Annotated[
        bool, typer.Option("--list-models", help="Print the known shapes and devices.")
    ] = False,
    json: Json = False,
) -> None:
    """Predict time, throughput and memory of an operating point, from arithmetic alone."""
    from rich.console import Console

    from ridgeline.cli.render.predict import prediction_table
    from ridgeline.errors import BadInput
    from ridgeline.modelspec.families.shapes import known_shapes
    from ridgeline.plan.step_time.predict import Point
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.planning.device_catalogue import read_catalogue
    from ridgeline.workflows.planning.predict import predict_point

    out = Console(highlight=False)
    if list_models:
        out.print("models:  " + " ".join(known_shapes()))
        out.print("devices: " + " ".join(read_catalogue(catalogue, calibration)))
        return
    if input is not None:
        if model is not None or device is not None:
            raise BadInput("MODEL and --device have no effect with --input", value=input)
        if not predict_file(input, output, read_catalogue(catalogue, calibration)):
            raise typer.Exit(2)
        return
    if output is not None:
        raise BadInput("--output has no effect without --input", value=str(output))
    point = Point(
        model=model or "",
        device=device or "",
        isl=isl,
        osl=osl,
        batch=batch,
        tp=tp,
        pp=pp,
        ep=ep,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        cached=cached,
        max_num_batched_tokens=max_num_batched_tokens,
        num_speculative_tokens=num_speculative_tokens,
        acceptance=acceptance,
        draft_model=draft_model,
    )
    result = predict_point(point, catalogue=catalogue, calibration=calibration)
    if json:
        print(json_line(result.to_dict()))
    else:
        out.print(prediction_table(result))


def predict_file(source: str, output: Path | None, rows: dict[str, Accelerator]) -> bool:
    """Predict every line of a JSONL file (`-`: stdin); False if a line could not be predicted."""
    from ridgeline.errors import BadInput
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


def plan(
    model: Annotated[str, typer.Argument(help=SHAPE, show_default=False)],
    workload: Annotated[str | None, typer.Option(help=WORKLOADS)] = None,
    isl: Annotated[int | None, typer.Option(help="Prompt tokens (default: 1024).")] = None,
    osl: Annotated[int | None, typer.Option(help="Answer tokens (default: 256).")] = None,
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 1.0,
    cached: Annotated[
        float, typer.Option(help="Share of prompt tokens that the prefix cache holds.")
    ] = 0.0,
    slo: Annotated[str, typer.Option(help="The promise, in ms.")] = "ttft:1000 tpot:50",
    device: Annotated[
        str | None, typer.Option(help="Devices, with commas (default: all that have a price).")
    ] = None,
    weight_dtype: Annotated[
        str | None, typer.Option(help=f"With commas: {WEIGHTS} Default: as stored, and fp8.")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help=f"With commas: {KV} Default: as stored, and fp8.")
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Most dollars per month.")] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(help="Dollars per device and hour, instead of the catalogue's.")
    ] = None,
    accept_stale: AcceptStale = False,
    max_devices: Annotated[int, typer.Option(help="Most devices of one replica.")] = 16,
    max_model_len: Annotated[
        int | None, typer.Option(help="For the commands (default: the longest request).")
    ] = None,
    catalogue: Catalogue = None,
    calibration: Calibrated = None,
    manifests: Annotated[
        Path | None,
        typer.Option(help="Write Kubernetes and Ray Serve manifests there.", metavar="FOLDER"),
    ] = None,
    cluster: Cluster = "gpu-operator",
    node_label: NodeLabel = None,
    image: Image = None,
    ray_image: RayImage = None,
    html: Annotated[Path | None, typer.Option(help="Write a page.", metavar="FILE")] = None,
    json: Json = False,
) -> None:
    """Choose a fleet: devices, layout, formats, replicas; with intervals, dollars and commands."""
    from rich.console import Console

    from ridgeline.cli.render.plan import print_plan
    from ridgeline.plan.deploy.clusters import Asked
    from ridgeline.report.files import write_file
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.planning.plan import PlanOptions
    from ridgeline.workflows.planning.plan import plan as make_plan

    options = PlanOptions(
        model=model,
        workload=workload,
        isl=isl,
        osl=osl,
        rate=rate,
        cached=cached,
        slo=slo,
        devices=device,
        weight_dtypes=weight_dtype,
        kv_dtypes=kv_dtype,
        budget=budget,
        price_per_hour=price_per_hour,
        accept_stale=accept_stale,
        max_devices=max_devices,
        max_model_len=max_model_len,
        catalogue=catalogue,
        calibration=calibration,
        manifests=manifests is not None,
        place=Asked(cluster=cluster, image=image, ray_image=ray_image, node_label=node_label),
    )
    result = make_plan(options)
    if html is not None:
        write_file(html, [result.to_html().encode()])
    if json:
        print(json_line(result.to_dict()))
    else:
        print_plan(result, Console(highlight=False))
    if manifests is not None:
        err = Console(highlight=False, stderr=True)
        for path in result.save_manifests(manifests):
            err.print(f"written: {path}", style="dim", markup=False, soft_wrap=True)
        left_out = {} if result.manifests is None else result.manifests.left_out
        for name, why in left_out.items():
            err.print(f"not written: {name}: {why}", style="yellow", markup=False, soft_wrap=True)


def simulate(
    model: Annotated[str, typer.Argument(help=SHAPE, show_default=False)],
    device: Devices = None,
    workload: Annotated[str | None, typer.Option(help=WORKLOADS)] = None,
    isl: Annotated[int | None, typer.Option(help="Prompt tokens (default: 1024).")] = None,
    osl: Annotated[int | None, typer.Option(help="Answer tokens (default: 256).")] = None,
    rate: Annotated[float, typer.Option(help="Requests per second, Poisson.")] = 1.0,
    num_prompts: Annotated[int, typer.Option(help="Requests, or most of a recording.")] = 1000,
    replay_speed: Annotated[
        float | None, typer.Option(help="Keep a recording's instants, so many times as fast.")
    ] = None,
    batch_share: BatchShare = 0.0,
    off_peak: OffPeakHours = None,
    num_speculative_tokens: Drafts = 0,
    acceptance: Acceptance = None,
    replicas: Annotated[int, typer.Option(help="Replicas (with --autoscale: at least).")] = 1,
    decode_replicas: DecodeReplicas = 0,
    router: RouterName = "least-loaded",
    tp: Annotated[int, typer.Option(help="Tensor parallel devices of a replica.")] = 1,
    ep: Annotated[int, typer.Option(help="Devices that whole experts are spread over.")] = 1,
    weight_dtype: Annotated[str | None, typer.Option(help=WEIGHTS)] = None,
    kv_dtype: Annotated[str | None, typer.Option(help=KV)] = None,
    slo: Annotated[str | None, typer.Option(help="The promise, in ms.")] = None,
    max_num_seqs: Seats = None,
    max_num_batched_tokens: StepTokens = None,
    enable_prefix_caching: SharePrefixes = False,
    autoscale: Annotated[int | None, typer.Option(help="Most replicas to scale to.")] = None,
    target_in_flight: Annotated[
        float, typer.Option(help="With --autoscale: requests in flight per replica.")
    ] = 16.0,
    startup_s: Annotated[float, typer.Option(help="Seconds until a new replica serves.")] = 120.0,
    mtbf_s: Annotated[
        float | None, typer.Option(help="Replicas fail after so many seconds, on average.")
    ] = None,
    repair_s: Annotated[float, typer.Option(help="Seconds until a failed one is back.")] = 120.0,
    seed: Annotated[int, typer.Option(help="Decides every number.", min=0)] = 0,
    num_seeds: Seeds = 1,
    sweep: Sweep = None,
    num_workers: Workers = None,
    step_by_step: Annotated[
        bool, typer.Option("--step-by-step", help="No leaps over calm steps: slow, the same.")
    ] = False,
    catalogue: Catalogue = None,
    calibration: Calibrated = None,
    html: Annotated[Path | None, typer.Option(help="Write a page.", metavar="FILE")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace, for Perfetto.", metavar="FILE")
    ] = None,
    json: Json = False,
) -> None:
    """Run a fleet on a virtual clock: the engine's own scheduler, with modelled step times."""
    from ridgeline.cli.commands.simulate import SimulationOutputs, run_simulation
    from ridgeline.workflows.planning.simulate import SimulateOptions

    options = SimulateOptions(
        model=model,
        device=device,
        tp=tp,
        ep=ep,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        replicas=replicas,
        decode_replicas=decode_replicas,
        router=router,
        workload=workload,
        isl=isl,
        osl=osl,
        rate=rate,
        num_prompts=num_prompts,
        replay_speed=replay_speed,
        batch_share=batch_share,
        off_peak=off_peak,
        num_speculative_tokens=num_speculative_tokens,
        acceptance=acceptance,
        slo=slo,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefix_caching=enable_prefix_caching,
        autoscale=autoscale,
        target_in_flight=target_in_flight,
        startup_s=startup_s,
        mtbf_s=mtbf_s,
        repair_s=repair_s,
        catalogue=catalogue,
        calibration=calibration,
        seed=seed,
        num_seeds=num_seeds,
        step_by_step=step_by_step,
    )
    outputs = SimulationOutputs(html=html, trace=trace, json=json)
    code = run_simulation(options, outputs, sweep or (), num_workers)
    if code:
        raise typer.Exit(code)


def cost(
    model: Annotated[str, typer.Argument(help=SHAPE, show_default=False)],
    device: Annotated[str, typer.Option(help="An accelerator of the catalogue.")],
    workload: Annotated[str | None, typer.Option(help=WORKLOADS)] = None,
    isl: Annotated[int, typer.Option(help="Prompt tokens.")] = 1024,
    osl: Annotated[int, typer.Option(help="Answer tokens.")] = 256,
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 1.0,
    slo: Annotated[
        str, typer.Option(help="The promise of the fleet, in ms.")
    ] = "ttft:1000 tpot:50",
    prefix: Annotated[int, typer.Option(help="Prompt tokens that requests share.")] = 0,
    hit_rate: Annotated[float, typer.Option(help="Share of requests that find them cached.")] = 0.0,
    prefixes: Annotated[int, typer.Option(help="How many such prefixes are kept.")] = 1,
    batch: Annotated[bool, typer.Option("--batch", help="Use the batch interfaces.")] = False,
    long_lived: Annotated[
        bool, typer.Option("--long-lived", help="Write cached prefixes for an hour.")
    ] = False,
    price_per_hour: Annotated[
        float | None, typer.Option(help="Dollars per device and hour: on demand, reserved, spot.")
    ] = None,
    spot_price: SpotPrice = None,
    spot_interruptions: SpotInterruptions = 0.05,
    spot_lost_s: SpotLost = 300.0,
    owned_dollars: Annotated[
        float | None, typer.Option(help="Owned devices: what one cost, host included.")
    ] = None,
    owned_years: Annotated[float, typer.Option(help="Years that it serves.")] = 4.0,
    watts: Annotated[
        float | None, typer.Option(help="Owned: watts of one under load, host included.")
    ] = None,
    dollars_per_kwh: Annotated[float, typer.Option(help="Owned: price of power.")] = 0.12,
    pue: Annotated[float, typer.Option(help="Owned: power usage effectiveness.")] = 1.3,
    prices: Annotated[
        Path | None, typer.Option(help="Provider prices instead of ours (TOML).", metavar="FILE")
    ] = None,
    accept_stale: AcceptStale = False,
    catalogue: Catalogue = None,
    calibration: Calibrated = None,
    json: Json = False,
) -> None:
    """Compare a fleet of your own with providers' prices: per request, per month, break-even."""
    from rich.console import Console

    from ridgeline.cli.render.cost import print_cost
    from ridgeline.errors import BadInput
    from ridgeline.plan.cost.ownership import Owned, Spot
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.planning.cost import CostOptions
    from ridgeline.workflows.planning.cost import cost as compare_cost

    owned = None
    if owned_dollars is not None:
        if watts is None:
            raise BadInput("--owned-dollars needs --watts", value=owned_dollars)
        owned = Owned(
            dollars=owned_dollars,
            years=owned_years,
            watts=watts,
            dollars_per_kwh=dollars_per_kwh,
            pue=pue,
        )
    spot = None
    if spot_price is not None:
        spot = Spot(price=spot_price, interruptions_per_hour=spot_interruptions, lost_s=spot_lost_s)
    options = CostOptions(
        model=model,
        device=device,
        workload=workload,
        isl=isl,
        osl=osl,
        rate=rate,
        slo=slo,
        prefix=prefix,
        hit_rate=hit_rate,
        num_prefixes=prefixes,
        batch=batch,
        long_lived=long_lived,
        price_per_hour=price_per_hour,
        owned=owned,
        spot=spot,
        prices=prices,
        accept_stale=accept_stale,
        catalogue=catalogue,
        calibration=calibration,
    )
    result = compare_cost(options)
    if json:
        print(json_line(result.to_dict()))
    else:
        print_cost(result, Console(highlight=False))
