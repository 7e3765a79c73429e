"""Keywords of the public functions are the options of the table: names, defaults, errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ridgeline
from ridgeline.api import improve, measure, planning
from ridgeline.api.explain import explain
from ridgeline.api.inspect import doctor
from ridgeline.api.inspect import inspect as inspect_model
from ridgeline.api.server import serve
from ridgeline.api.simulate import simulate
from ridgeline.api.text import batch
from ridgeline.config.improve import (
    EvaluateOptions,
    OptimizeOptions,
    QuantizeFiles,
    QuantizeOptions,
    TargetServerOptions,
)
from ridgeline.config.load import BenchOptions, BenchTarget, DiagnoseOptions, PredictOptions
from ridgeline.config.option import Section, options_of
from ridgeline.config.planning import (
    CalibrateOptions,
    CapacityOptions,
    CostOptions,
    PackOptions,
    PlanOptions,
    SimulateOptions,
)
from ridgeline.config.server import ServeModel, ServerOptions, TwinOptions
from ridgeline.config.tools import (
    BatchFileOptions,
    CatalogueOptions,
    CompareOptions,
    DoctorOptions,
    ExplainOptions,
    InspectOptions,
)
from ridgeline.errors import BadInput

OUTPUTS = {"html", "json", "trace"}  # of the command line; a record saves itself
NOT_KEYWORDS: dict[Callable[..., Any], tuple[tuple[type[Section], ...], set[str]]] = {
    planning.plan: ((PlanOptions,), OUTPUTS),
    planning.predict: ((PredictOptions,), {"input", "output", "list_models", "json"}),
    simulate: (
        (SimulateOptions,),
        {*OUTPUTS, "sweep", "num_workers", "num_seeds"},
    ),
    planning.cost: ((CostOptions,), OUTPUTS),
    measure.bench: ((BenchTarget, BenchOptions), {"named_model"}),
    measure.diagnose: (
        (DiagnoseOptions, BenchOptions),
        {*OUTPUTS, "nsight", "profile", "stream"},
    ),
    improve.optimize: ((OptimizeOptions, TargetServerOptions), {*OUTPUTS, "output"}),
    improve.quantize: ((QuantizeFiles, QuantizeOptions), OUTPUTS),
    improve.evaluate: ((EvaluateOptions,), OUTPUTS),
    explain: ((ExplainOptions,), OUTPUTS),
    serve: ((ServeModel, ServerOptions, TwinOptions), set()),
    planning.capacity: ((CapacityOptions,), OUTPUTS),
    planning.catalogue: ((CatalogueOptions,), {*OUTPUTS, "output"}),
    planning.pack: ((PackOptions,), OUTPUTS),
    measure.calibrate: ((CalibrateOptions,), {*OUTPUTS, "output"}),
    measure.compare: ((CompareOptions,), OUTPUTS),
    inspect_model: ((InspectOptions,), OUTPUTS),
    doctor: ((DoctorOptions,), OUTPUTS),
    batch: ((BatchFileOptions,), OUTPUTS),
}


@pytest.mark.parametrize("function", NOT_KEYWORDS, ids=lambda function: function.__name__)
def test_keywords_have_the_names_and_defaults_of_the_table(function: Callable[..., Any]) -> None:
    sections, left_out = NOT_KEYWORDS[function]
    parameters = inspect.signature(function).parameters
    options = {
        name: option
        for section in sections
        for name, option in options_of(section).items()
        if name not in left_out
    }
    own = {"observer", "settings", "output", "price_per_hour"}
    assert set(parameters) - own == set(options) - own
    for name, option in options.items():
        default = parameters[name].default
        if option.default is msgspec.NODEFAULT:
            assert default is inspect.Parameter.empty, name
        else:
            expected = option.default
            assert default == (str(expected) if isinstance(expected, Path) else expected), name


def described_arguments(function: Callable[..., Any]) -> dict[str, str]:
    """The `Args` of a docstring by name, each on one line."""
    section = re.search(r"^Args:\n(.*?)\n\n", inspect.getdoc(function) or "", re.M | re.S)
    assert section is not None
    entries = re.split(r"^    (?=\w+: )", section[1], flags=re.M)[1:]
    return {name: " ".join(text.split()) for name, text in (e.split(": ", 1) for e in entries)}


@pytest.mark.parametrize("function", NOT_KEYWORDS, ids=lambda function: function.__name__)
def test_docstrings_describe_keywords_as_the_table_does(function: Callable[..., Any]) -> None:
    described = described_arguments(function)
    assert set(described) == set(inspect.signature(function).parameters)
    for section in NOT_KEYWORDS[function][0]:
        for name, option in options_of(section).items():
            if name not in described or name == "output":  # a keyword of another meaning
                continue
            about = option.about
            default = f" (default: {about.unset})" if about.unset else ""
            assert described[name] == f"{about.help.removesuffix('.')}{default}.", name


WRONG: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (planning.plan, {"model": "llama-3.1-8b", "request_rate": 0}, "request_rate is out of range"),
    (planning.plan, {"model": "llama-3.1-8b", "request_rate": "fast"}, "request_rate must be a"),
    (planning.plan, {"model": "llama-3.1-8b", "slo": "quick"}, "quick"),
    (planning.plan, {"model": "llama-3.1-8b", "image": "vllm:1"}, "image has no effect without"),
    (planning.plan, {"model": None}, "model must not be None"),
    (planning.predict, {"model": "llama-3.1-8b", "accelerator": "abacus"}, "abacus"),
    (planning.predict, {"max_concurrency": 1.5}, "max_concurrency must be a whole number"),
    (simulate, {"model": "llama-3.1-8b", "router": "random"}, "router has no such"),
    (
        simulate,
        {"model": "llama-3.1-8b", "startup_s": "1m"},
        "startup_s has no effect without autoscale",
    ),
    (
        planning.cost,
        {"model": "llama-3.1-8b", "accelerator": "l4", "hit_rate": 0.5},
        "hit_rate has no effect without prefix_len",
    ),
    (measure.bench, {"num_prompts": 0}, "num_prompts is out of range; got 0; limit: >= 1"),
    (measure.bench, {"slo": "ttft"}, "ttft"),
    (measure.bench, {"url": "http://x", "max_num_seqs": 3}, "max_num_seqs has no effect with url"),
    (measure.bench, {"endpoint": "chat"}, "endpoint has no effect without url"),
    (measure.bench, {"max_num_seq": 3}, "unknown option; got 'max_num_seq'"),
    (measure.diagnose, {"run": "no-such-run.jsonl"}, "no-such-run.jsonl"),
    (measure.diagnose, {"burstiness": 2.0}, "burstiness has no effect without request_rate"),
    (improve.optimize, {"budget": "soon"}, "budget must be seconds"),
    (improve.optimize, {"objective": "fame"}, "objective has no such choice"),
    (improve.optimize, {"url": "http://x"}, "url has no effect without restart_cmd"),
    (improve.quantize, {"model": "demo", "output": "x", "bits": 7}, "bits has no such choice"),
    (improve.quantize, {"model": "demo", "output": None}, "output must not be None"),
    (improve.evaluate, {"a": "demo", "b": "demo", "lm_eval_limit": 4}, "without lm_eval"),
    (serve, {"port": 70000}, "port is out of range"),
    (serve, {"host": "0.0.0.0", "model": "demo"}, "no API key is configured"),
    (serve, {"batch_window": "22:00-06:00"}, "batch_window has no effect without batch_store"),
    (planning.capacity, {"model": "llama-3.1-8b", "context": "9e9"}, "needs lengths in tokens"),
    (planning.catalogue, {"device": "h100"}, "several accelerators match"),
    (planning.pack, {"models": "m.toml", "accelerator": "h100-sxm=1"}, "cannot read the models"),
    (measure.calibrate, {}, "needs either a model"),
    (measure.calibrate, {"url": "http://x", "also": ("a=int8",)}, "also has no effect with url"),
    (measure.compare, {"a": "no-a.json", "b": "no-b.json"}, "no-a.json"),
    (inspect_model, {"model": "demo", "against": "demo"}, "--against needs a quantised model"),
    (batch, {"file": "no.jsonl", "output": "x", "model": "demo"}, "no.jsonl"),
    (explain, {"subject": "ttfft"}, "did you mean ttft"),
    (explain, {"subject": "demo", "model": "demo"}, "has no effect after a model"),
]


@pytest.mark.parametrize(("function", "keywords", "message"), WRONG)
def test_wrong_values_are_refused(
    function: Callable[..., Any], keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput) as caught:
        function(**keywords)
    assert message in str(caught.value)


def test_positional_use_is_limited_to_the_main_arguments() -> None:
    with pytest.raises(TypeError):
        ridgeline.predict("llama-3.1-8b", "h100-sxm")  # type: ignore[misc]
