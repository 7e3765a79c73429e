"""`ridgeline lab casestudy`: stages that run are measured, the others say why they do not."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import ridgeline
from ridgeline.cli.main import main
from ridgeline.cli.render.measure.case_study import print_case_study
from ridgeline.config.load import LabOptions
from ridgeline.config.settings import Settings, Speculative
from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware.ceilings import MeasuredCeilings
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import cost_model
from ridgeline.records import MachineLoad, StepStat
from ridgeline.records.progress import silent
from ridgeline.workflows.lab import run_case_study, stage_bench
from ridgeline.workflows.lab.case_study import CaseStudy, StageRound
from ridgeline.workflows.lab.open_stage import OpenStage, StageWork, round_of
from ridgeline.workflows.lab.run_case_study import (
    chosen_stages,
    command_of,
    measure_stages,
    study_settings,
)
from ridgeline.workflows.lab.stage_bench import StageBench
from ridgeline.workflows.lab.study_stages import STAGE_NAMES, StudyStage, study_stages
from tests.conformance.tiny_models import make_model

WORK = StageWork(prompts=((5, 6, 7, 8), (9, 10, 11, 12)), output_len=10, windows=((1, 2, 3, 4),))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    make_model("llama", path)
    return str(path)


@pytest.fixture(scope="module")
def study(tiny: str) -> CaseStudy:
    ceilings = MeasuredCeilings(bytes_s={1: 1e9}, flops_s={"float32": 1e9}, cpu_share=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_case_study, "ceilings_of", lambda *_: ceilings)
        return ridgeline.casestudy(
            tiny,
            device="cpu",
            num_threads=1,
            max_concurrency=2,
            input_len=12,
            output_len=10,
            rounds=2,
            stages="eager,kernels,int8,int4,speculation",
        )


def test_every_stage_is_measured_in_every_round(study: CaseStudy) -> None:
    assert [stage.name for stage in study.stages] == [n for n in STAGE_NAMES if n != "compile"]
    for stage in study.stages:
        assert not stage.why_not and len(stage.rounds) == 2, stage.why_not
        assert stage.mbu == pytest.approx((stage.median("bytes_s") or 0) / 1e9)
    eager, kernels, int8, int4, speculation = study.stages
    assert (eager.uses["layer_backend"], kernels.uses["layer_backend"]) == ("torch", "native")
    assert eager.quality is None and study.gain(eager) == 1.0
    assert kernels.quality is not None and kernels.quality.kl < 1e-4
    assert int4.quality is not None and int8.quality is not None
    assert int4.quality.kl > int8.quality.kl >= 0
    assert eager.weight_bytes is not None and int4.weight_bytes is not None
    assert int4.weight_bytes < eager.weight_bytes
    assert [stage.honesty for stage in study.stages] == ["exact"] * 2 + ["lossy"] * 3
    assert speculation.same_tokens is True


def test_record_saves_and_displays_itself(study: CaseStudy, tmp_path: Path) -> None:
    saved = json.loads(study.save(tmp_path / "study.json").read_text())
    assert saved == json.loads(json.dumps(study.to_dict()))
    assert saved["stages"][0]["tok_s"]["low"] <= saved["stages"][0]["tok_s"]["median"]
    page = study.save(tmp_path / "study.html").read_text()
    assert "<script" not in page and "speculation" in page and study.command in page
    assert study._repr_html_().startswith("<iframe")


def test_table_fits_eighty_columns(study: CaseStudy) -> None:
    out = io.StringIO()
    print_case_study(study, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("again:"))
    assert any(line.startswith("int4 ") and "x" in line for line in lines)


def test_busy_machine_is_named(study: CaseStudy) -> None:
    import msgspec

    busy = msgspec.structs.replace(study, load=MachineLoad(others_share=0.5))
    idle = msgspec.structs.replace(study, load=MachineLoad(others_share=0.01))
    assert busy.is_busy and "busy" in busy.to_html()
    assert not idle.is_busy and "busy" not in idle.to_html()


def refused(tiny: str, stage: StudyStage) -> Any:
    settings = Settings(model=tiny, device="cpu", max_num_seqs=2, max_model_len=16, num_threads=1)
    bench = StageBench(settings, "cpu", WORK)
    bench.plan_memory([stage])
    bench.open(stage)
    bench.run_round()
    (result,) = bench.results(lambda size: 1e9)
    return result


def test_stage_that_cannot_run_says_why_and_is_not_replaced(tiny: str) -> None:
    stage = StudyStage(
        name="kernels", title="", honesty="exact", settings={"layer_backend": "triton"}
    )
    result = refused(tiny, stage)
    assert "layer backend 'triton' cannot run here" in result.why_not
    assert result.rounds == () and result.mbu is None and result.uses == {}


def test_stage_that_fails_while_it_runs_says_why(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no kernel\nimage is available")

    monkeypatch.setattr(stage_bench, "OpenStage", fail)
    stage = study_stages(Speculative(method="ngram"))[0]
    assert refused(tiny, stage).why_not == "RuntimeError: no kernel image is available"


def small_bench(tiny: str, *names: str) -> tuple[StageBench, list[StudyStage]]:
    settings = Settings(model=tiny, device="cpu", max_num_seqs=2, max_model_len=16, num_threads=1)
    bench = StageBench(settings, "cpu", WORK)
    return bench, [one for one in study_stages(Speculative(method="ngram")) if one.name in names]


def test_stage_that_fails_in_a_later_round_does_not_end_the_study(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, stages = small_bench(tiny, "eager", "int8")
    run_round, ran = OpenStage.run_round, list[OpenStage]()

    def full(stage: OpenStage) -> StageRound:
        ran.append(stage)
        if len(ran) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run_round(stage)

    monkeypatch.setattr(OpenStage, "run_round", full)
    measure_stages(bench, stages, 2, silent)
    eager, int8 = bench.results(lambda size: 1e9)
    bench.close()
    assert eager.why_not == "OutOfMemoryError: CUDA out of memory" and eager.rounds == ()
    assert not int8.why_not and len(int8.rounds) == 2


def test_interrupted_study_keeps_the_stages_that_it_reached(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ceilings = MeasuredCeilings(bytes_s={1: 1e9}, flops_s={"float32": 1e9}, cpu_share=1.0)
    monkeypatch.setattr(run_case_study, "ceilings_of", lambda *_: ceilings)
    open_stage = StageBench.open

    def interrupted(bench: StageBench, stage: StudyStage) -> None:
        if stage.name == "int4":
            raise KeyboardInterrupt
        open_stage(bench, stage)

    monkeypatch.setattr(StageBench, "open", interrupted)
    flags = "--device cpu --num-threads 1 --input-len 12 --output-len 8 --stages eager,int8,int4"
    saved = tmp_path / "study.json"
    words = ["lab", "casestudy", tiny, *flags.split(), "--output-json", str(saved)]
    assert main(words) == 130
    record = json.loads(saved.read_text())
    assert record["interrupted"] is True
    assert [(one["name"], len(one["rounds"])) for one in record["stages"]] == [
        ("eager", 1),
        ("int8", 1),
        ("int4", 0),
    ]
    assert "interrupted before it was measured" in record["stages"][2]["why_not"]
    assert record["stages"][2]["settings"] == {"quantization": "int4"}
    assert "interrupted, so that" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CannotRun("the GPU is full")])
def test_study_is_complete_although_the_last_measurement_of_the_bandwidth_is_not(
    tiny: str, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    measured = [MeasuredCeilings(bytes_s={1: 1e9}, flops_s={"float32": 1e9}, cpu_share=1.0)]

    def measure(*_: object) -> MeasuredCeilings:
        if not measured:
            raise error
        return measured.pop()

    monkeypatch.setattr(run_case_study, "ceilings_of", measure)
    study = ridgeline.casestudy(
        tiny, device="cpu", num_threads=1, input_len=12, output_len=8, rounds=1, stages="eager"
    )
    assert not study.interrupted and study.stages[0].bandwidth_bytes_s == 1e9


def test_stage_that_cannot_stay_open_is_opened_once_in_every_round(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first round opened each for its quality, and again for its figures."""
    events: list[str] = []

    class Observed(OpenStage):
        def __init__(self, settings: Settings, work: StageWork) -> None:
            events.append("open")
            super().__init__(settings, work)

        def close(self) -> None:
            events.append("close")
            super().close()

    monkeypatch.setattr(stage_bench, "_free_bytes", lambda _: 0.0)
    monkeypatch.setattr(stage_bench, "OpenStage", Observed)
    bench, stages = small_bench(tiny, "eager", "int8")
    measure_stages(bench, stages, 2, silent)
    assert not bench.keeps_open and events == ["open", "close"] * 4
    assert [len(stage.rounds) for stage in bench.results(lambda size: 1e9)] == [2, 2]


def test_study_that_is_interrupted_before_its_first_figure_has_none(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ceilings = MeasuredCeilings(bytes_s={1: 1e9}, flops_s={"float32": 1e9}, cpu_share=1.0)
    monkeypatch.setattr(run_case_study, "ceilings_of", lambda *_: ceilings)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StageBench, "measure", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ridgeline.casestudy(
            tiny, device="cpu", num_threads=1, input_len=12, output_len=8, stages="eager"
        )


def test_round_counts_steps_after_the_last_prompt(tiny: str) -> None:
    def step(at_s: float, *shapes: tuple[int, int]) -> StepStat:
        return StepStat(
            index=0, at_s=at_s, plan_s=0.25, run_s=0.75, shapes=shapes, num_sampled=len(shapes),
            num_running=2, num_waiting=0, used_blocks=1, num_blocks=9, max_num_seqs=2,
        )  # fmt: skip

    # One prompt is fed after the other, which has three tokens by then: two sequences of 10 tokens
    # lack 7 and 9 when the timed steps begin.
    steps = [step(0, (4, 0)), step(1, (1, 4), (2, 0)), step(2, (1, 5), (2, 2))]
    steps += [step(3 + i, (1, 6 + i), (1, 4 + i)) for i in range(7)]
    steps += [step(10 + i, (1, 11 + i)) for i in range(2)]
    model = cost_model(load_spec(tiny))
    measured = round_of(model, steps, WORK)
    assert measured.tok_s == pytest.approx((7 + 9) / 9)
    assert measured.step_s == 1.0
    assert measured.tokens_per_step == 1.0
    expected = sum(model.step(one.shapes, one.num_sampled).bytes for one in steps[3:])
    assert measured.bytes_s == pytest.approx(expected / 9)


def test_backends_of_a_stage_are_named_for_each_device() -> None:
    stages = {stage.name: stage for stage in study_stages(Speculative(method="ngram"))}
    assert stages["kernels"].settings_on("cuda")["layer_backend"] == "triton"
    assert stages["kernels"].settings_on("cpu")["layer_backend"] == "native"
    assert stages["compile"].settings_on("cuda")["attention_backend"] == "tables"
    assert stages["eager"].settings_on("cuda") == stages["eager"].settings_on("cpu")


def test_unknown_stage_is_refused() -> None:
    with pytest.raises(BadInput, match="no such stage"):
        chosen_stages(LabOptions(study="casestudy", stages="eager,fp2"))


def test_prompts_that_are_too_long_are_refused_by_the_options_of_the_study(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error named --max-model-len, which the command does not have."""
    assert main(["lab", "casestudy", tiny, "--device", "cpu", "--input-len", "100000"]) == 2
    error = capsys.readouterr().err
    assert "lower --input-len or --output-len" in error and "--max-model-len" not in error


def test_printed_command_repeats_the_study() -> None:
    options = LabOptions(
        study="casestudy", model="demo", rounds=1, stages="int4, speculation",
        speculative_config=Speculative(method="ngram", num_speculative_tokens=3),
    )  # fmt: skip
    words = shlex.split(command_of(options))
    assert words[:4] == ["ridgeline", "lab", "casestudy", "demo"]
    assert words[words.index("--stages") + 1] == "int4,speculation"
    drafts = json.loads(words[words.index("--speculative-config") + 1])
    assert drafts == {"method": "ngram", "num_speculative_tokens": 3}
    assert study_settings(options).max_model_len == options.input_len + options.output_len


def test_command_prints_json_and_reports_that_nothing_ran(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, study: CaseStudy
) -> None:
    import msgspec

    monkeypatch.setattr(run_case_study, "run_case_study", lambda *_: study)
    assert main(["lab", "casestudy", "demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"][0]["name"] == "eager"
    stages = tuple(msgspec.structs.replace(one, why_not="no", rounds=()) for one in study.stages)
    nothing = msgspec.structs.replace(study, stages=stages)
    monkeypatch.setattr(run_case_study, "run_case_study", lambda *_: nothing)
    assert main(["lab", "casestudy", "demo"]) == 2
    assert "not run: no" in capsys.readouterr().out
