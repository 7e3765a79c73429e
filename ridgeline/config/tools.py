"""Options of the commands that generate, talk to a server, look, explain and check."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from ridgeline.config import shared
from ridgeline.config.option import About, Section
from ridgeline.config.shared import DEFAULT_MODEL, EXAMPLE_MODEL, MODEL_HELP
from ridgeline.config.units import (
    COUNT,
    DURATION,
    MAX_SECONDS,
    MILLISECONDS,
    NUMBER,
    PERCENT,
    PORT,
    TOKENS,
    Range,
)
from ridgeline.records.price import Commitment

TABLES_URL = "https://raw.githubusercontent.com/skypilot-org/skypilot-catalog/master/catalogs/v8"
LOCAL_URL = "http://127.0.0.1:8000"
_TEMPERATURE = About("Sampling temperature; 0 is greedy.", unit=NUMBER, range=Range(0, 1e6))
_TOP_P = About("Nucleus sampling.", unit=NUMBER, range=Range(0, 1, exclusive=True))
_MAX_TOKENS = About("Maximum output tokens.", unit=TOKENS)


class GenerateOptions(Section, frozen=True, kw_only=True):
    """One prompt, and how its answer is sampled."""

    title: ClassVar[str] = "Sampling"
    table: ClassVar[str] = "generate"
    prefix: ClassVar[str] = "generate_"

    model: Annotated[str | None, shared.OPTIONAL_MODEL] = None
    prompt: Annotated[
        str, About("The prompt; - reads it from stdin.", positional=True, required=True)
    ]
    max_tokens: Annotated[int, _MAX_TOKENS] = 128
    temperature: Annotated[float, _TEMPERATURE] = 0.0
    top_p: Annotated[float, _TOP_P] = 1.0
    stop: Annotated[
        tuple[str, ...],
        About("Stop at this text; repeatable.", metavar="TEXT", ambient=False),
    ] = ()
    chat: Annotated[bool, About("Apply the model's chat template.")] = False
    json: Annotated[bool, shared.JSON.but(panel="Output", since="0.3")] = False


class BatchFileOptions(Section, frozen=True, kw_only=True):
    """A file of requests to answer without a server."""

    title: ClassVar[str] = "Batch"

    file: Annotated[
        Path,
        About(
            "JSONL file of requests, in the format of /v1/batches.",
            positional=True,
            required=True,
            path="input",
        ),
    ]
    output: Annotated[
        Path,
        About(
            "JSONL file for the answers.",
            short="-o",
            path="file",
            required=True,
            ambient=False,
        ),
    ]
    model: Annotated[
        str | None,
        About(
            MODEL_HELP,
            metavar="MODEL",
            unset=DEFAULT_MODEL,
            ambient=False,
        ),
    ] = None
    served_model_name: Annotated[
        str | None,
        About(
            "Model name used in the file.",
            metavar="NAME",
            unset="the name of the model",
            ambient=False,
        ),
    ] = None
    json: Annotated[bool, shared.JSON.but(panel="Output", since="0.3")] = False


class ChatOptions(Section, frozen=True, kw_only=True):
    """A model or a server to talk to, and how its answers are sampled."""

    title: ClassVar[str] = "Chat"
    table: ClassVar[str] = "chat"
    prefix: ClassVar[str] = "chat_"

    model: Annotated[str | None, shared.OPTIONAL_MODEL] = None
    url: Annotated[
        str | None,
        shared.URL.but(
            help="Talk to a running server with the OpenAI API, not to a model in this process."
        ),
    ] = None
    api_key: Annotated[str | None, shared.API_KEY] = None
    served_model_name: Annotated[
        str | None, shared.SERVED_MODEL_NAME.but(unset="the server's default")
    ] = None
    system: Annotated[str | None, About("System prompt.", metavar="TEXT")] = None
    temperature: Annotated[
        float | None, _TEMPERATURE.but(unset="that of the model or server, otherwise 0.7")
    ] = None
    top_p: Annotated[float | None, _TOP_P.but(unset="that of the model or server, otherwise 1")] = (
        None
    )
    max_tokens: Annotated[int, _MAX_TOKENS] = 512


class TopOptions(Section, frozen=True, kw_only=True):
    """A server to watch."""

    title: ClassVar[str] = "Server"
    table: ClassVar[str] = "top"
    prefix: ClassVar[str] = "top_"

    url: Annotated[str, shared.URL.but(ambient=True)] = LOCAL_URL
    api_key: Annotated[str | None, shared.API_KEY] = None
    interval: Annotated[
        float,
        About("Time between updates.", unit=DURATION, range=Range(0.05, MAX_SECONDS)),
    ] = 1.0
    once: Annotated[bool, About("Print one table and exit.", ambient=False)] = False
    json: Annotated[bool, shared.JSON.but(help="With --once: print JSON.")] = False


class CatalogueOptions(Section, frozen=True, kw_only=True):
    """Accelerators and their prices."""

    title: ClassVar[str] = "Catalogue"
    table: ClassVar[str] = "catalogue"
    prefix: ClassVar[str] = "catalogue_"

    device: Annotated[
        str | None,
        About("Show this accelerator with all its prices.", positional=True, since="0.3"),
    ] = None
    commitment: Annotated[Commitment, shared.COMMITMENT] = "on-demand"
    prices: Annotated[
        Path | None,
        About(
            "Add prices: a TOML file of [[price]] rows, or a folder of SkyPilot's price tables "
            "(CLOUD/vms.csv). They replace those of the same provider and commitment.",
            path="input",
            since="0.3",
        ),
    ] = None
    as_of: Annotated[
        date | None,
        About("With a folder of price tables: the day they were fetched.", since="0.3"),
    ] = None
    update: Annotated[
        bool, About("Download today's prices: SkyPilot's tables of six clouds.", since="0.3")
    ] = False
    tables_url: Annotated[
        str, About("With --update: where the tables are.", metavar="URL", since="0.3")
    ] = TABLES_URL
    output: Annotated[
        Path | None,
        About(
            "Write all prices to this TOML file, which planning commands take as --device-prices.",
            path="file",
            ambient=False,
            since="0.3",
        ),
    ] = None
    catalogue: Annotated[Path | None, shared.CATALOGUE] = None
    json: Annotated[bool, shared.JSON] = False
    today: date | None = None


class CompareOptions(Section, frozen=True, kw_only=True):
    """Two results to compare."""

    a: Annotated[
        Path,
        About(
            "Result file, or a folder of repeated runs.",
            positional=True,
            required=True,
            path="input",
        ),
    ]
    b: Annotated[
        Path,
        About("The result to compare with A.", positional=True, required=True, path="input"),
    ]
    threshold: Annotated[float, About("Smallest change that matters.", unit=PERCENT)] = 2.0
    json: Annotated[bool, shared.JSON] = False


class ExplainOptions(Section, frozen=True, kw_only=True):
    """What to explain, and for which load."""

    title: ClassVar[str] = "Load"
    table: ClassVar[str] = "explain"
    prefix: ClassVar[str] = "explain_"

    subject: Annotated[
        str | None,
        About(
            "A model, or a topic (`ridgeline explain topics`).",
            positional=True,
            unset=EXAMPLE_MODEL,
        ),
    ] = None
    model: Annotated[str | None, shared.EXPLAINED_MODEL] = None
    workload: Annotated[str | None, shared.WORKLOAD.but(unset="chat-and-code")] = None
    slo: Annotated[str | None, shared.SLO_TEXT.but(unset="ttft:500 tpot:50")] = None
    request_rate: Annotated[float | None, shared.REQUEST_RATE] = None
    accelerator: Annotated[
        str | None,
        About(
            "Accelerator of the catalogue whose memory and peaks count, one device of it.",
            metavar="NAME",
            unset="this machine",
        ),
    ] = None
    json: Annotated[bool, shared.JSON.but(panel="Output")] = False


class InspectOptions(Section, frozen=True, kw_only=True):
    """A model to describe."""

    model: Annotated[str, shared.MODEL]
    against: Annotated[
        str | None,
        About("Original of a quantised model, to measure the error against.", metavar="MODEL"),
    ] = None
    what_if: Annotated[
        str | None,
        About(
            "Compare the KV cache with that of an edited model, in place of the usual tables: "
            "'key=value' of kv_heads, window, global_every, share, latent, kv_dtype and context.",
            metavar="EDITS",
        ),
    ] = None
    layout: Annotated[str | None, shared.LAYOUT] = None
    json: Annotated[bool, shared.JSON] = False


class PullOptions(Section, frozen=True, kw_only=True):
    """A model to download."""

    model: Annotated[
        str | None,
        shared.OPTIONAL_MODEL.but(
            help="Model to download: OWNER/REPO[@REVISION][:QUANTISATION] on the Hugging Face Hub, "
            "the address of a .gguf file, or 'smollm2'."
        ),
    ] = None
    json: Annotated[bool, shared.JSON.but(panel="Output", since="0.3")] = False


class ModelsOptions(Section, frozen=True, kw_only=True):
    """Models to list."""

    title: ClassVar[str] = "Models"

    fit: Annotated[
        bool,
        About("List published models that fit this machine, with predicted speeds.", ambient=False),
    ] = False
    calibration: Annotated[
        Path | None,
        About("With --fit: predict with this file of `ridgeline calibrate`.", path="input"),
    ] = None
    json: Annotated[bool, shared.JSON] = False


class DoctorOptions(Section, frozen=True, kw_only=True):
    """A check of this machine."""

    refresh: Annotated[bool, About("Measure again, even if there are recent results.")] = False
    json: Annotated[bool, shared.JSON] = False


class NewKeyOptions(Section, frozen=True, kw_only=True):
    """An API key to create."""

    name: Annotated[str, About("Name of the key's owner.", positional=True, required=True)]
    json: Annotated[bool, shared.JSON.but(panel="Output", since="0.3")] = False


class VersionOptions(Section, frozen=True, kw_only=True):
    """How the version is printed."""

    json: Annotated[bool, shared.JSON.but(since="0.3")] = False


class CompletionOptions(Section, frozen=True, kw_only=True):
    """A shell to complete commands in."""

    shell: Annotated[
        Literal["bash", "zsh", "fish"],
        About("Shell to generate the script for.", positional=True, required=True),
    ]


class MockServerOptions(Section, frozen=True, kw_only=True):
    """A scripted server, to test load generators against."""

    title: ClassVar[str] = "Server"
    table: ClassVar[str] = "mock-server"
    prefix: ClassVar[str] = "mock_server_"

    host: Annotated[str, About("Address to listen on.", metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[int, About("Port to listen on; 0 takes a free one.", unit=PORT)] = 8001
    ttft_ms: Annotated[float, About("Model 'steady': time to first token.", unit=MILLISECONDS)] = (
        50.0
    )
    itl_ms: Annotated[float, About("Model 'steady': time between tokens.", unit=MILLISECONDS)] = (
        10.0
    )
    tokens_per_chunk: Annotated[int, About("Model 'steady': tokens per chunk.", unit=TOKENS)] = 1
    max_num_seqs: Annotated[
        int | None,
        About(
            "Maximum requests at once; further ones queue.",
            unit=COUNT,
            unset="unlimited",
            since="0.2",
        ),
    ] = None
    log: Annotated[
        Path | None,
        About("On exit, write when each token was sent.", path="file", ambient=False),
    ] = None
    list_scripts: Annotated[
        bool, About("List the scripts, and exit.", flag="list", ambient=False)
    ] = False


class EnvironmentOptions(Section, frozen=True, kw_only=True):
    """What only the environment sets: it holds for every command and for the Python API."""

    title: ClassVar[str] = "Environment only"

    cache: Annotated[
        Path | None,
        About(
            "Folder of downloaded models and of measurements of this machine. Models of the "
            "Hugging Face Hub lie in its own cache (HF_HOME).",
            unset="`$XDG_CACHE_HOME/ridgeline`, else `~/.cache/ridgeline`",
            flag="",
            env="RIDGELINE_CACHE",
            ambient=False,
            path="folder",
        ),
    ] = None
    native_isa: Annotated[
        str | None,
        About(
            "Instruction set of the native kernels, to compare their variants.",
            unset="the widest that the CPU runs",
            flag="",
            env="RIDGELINE_NATIVE_ISA",
            ambient=False,
            metavar="ISA",
        ),
    ] = None


class OperateOptions(Section, frozen=True, kw_only=True):
    """Files for Prometheus and Grafana."""

    title: ClassVar[str] = "Files"

    what: Annotated[
        Literal["rules", "dashboards"],
        About(
            "rules: alert rules and their tests for promtool. dashboards: JSON for Grafana.",
            positional=True,
            required=True,
            since="0.3",
        ),
    ]
    server: Annotated[
        Literal["ridgeline", "vllm", "sglang", "tgi"],
        About("The server whose metrics are watched.", since="0.3", ambient=False),
    ] = "ridgeline"
    slo_classes: Annotated[
        str,
        About(
            "SLOs by request class, as of serve: 'chat=ttft:500 tpot:50 attainment:0.99'.",
            metavar="CLASSES",
            since="0.3",
            ambient=False,
        ),
    ] = "chat=ttft:1000 tpot:100"
    min_requests: Annotated[
        int,
        About(
            "Requests in an alert's long window below which it stays silent.",
            unit=COUNT,
            since="0.3",
            ambient=False,
        ),
    ] = 20
    out: Annotated[
        Path,
        About("Folder to write to.", metavar="DIR", path="output", since="0.3", ambient=False),
    ] = Path("operate")
    json: Annotated[bool, shared.JSON.but(panel="Output", since="0.3")] = False


class FleetOptions(Section, frozen=True, kw_only=True):
    """A fleet on Ray Serve."""

    title: ClassVar[str] = "Fleet"

    action: Annotated[
        Literal["up", "status", "top", "down"],
        About(
            "up: start the fleet of a file, or change the one that runs. status: show it once. "
            "top: show its load, live. down: end it.",
            positional=True,
            required=True,
            since="0.3",
        ),
    ]
    file: Annotated[
        Path | None,
        About(
            "The fleet's models: a TOML file.",
            positional=True,
            path="input",
            since="0.3",
        ),
    ] = None
    address: Annotated[
        str | None,
        About(
            "Ray cluster to use.",
            metavar="ADDRESS",
            unset="this machine's; up starts one if there is none",
            since="0.3",
            ambient=False,
        ),
    ] = None
    url: Annotated[
        str | None,
        shared.URL.but(
            help="With top: the gateway, which needs no Ray.",
            unset="that of the fleet on Ray",
            since="0.3",
        ),
    ] = None
    api_key: Annotated[str | None, shared.API_KEY.but(help="With top: its key.", since="0.3")] = (
        None
    )
    interval: Annotated[
        float,
        About(
            "With top: time between updates.",
            unit=DURATION,
            range=Range(0.05, MAX_SECONDS),
            since="0.3",
            ambient=False,
        ),
    ] = 1.0
    once: Annotated[
        bool, About("With top: print one table and exit.", since="0.3", ambient=False)
    ] = False
    ready_timeout_s: Annotated[
        float,
        About(
            "Maximum wait for the servers.",
            unit=DURATION,
            range=Range(1, MAX_SECONDS),
            since="0.3",
            ambient=False,
        ),
    ] = 900.0
    json: Annotated[bool, shared.JSON.but(since="0.3")] = False


def _deploys(text: str, **facts: Any) -> About:
    return About(text, since="0.3", ambient=False, **facts)


class DeployOptions(Section, frozen=True, kw_only=True):
    """Servers and the gateway before them, as files of a platform."""

    title: ClassVar[str] = "Deployment"

    platform: Annotated[
        Literal["docker", "compose", "kustomize", "helm", "kuberay", "ecs", "sagemaker"],
        _deploys("The platform to write for.", flag="for", required=True),
    ]
    server: Annotated[Literal["ridgeline", "vllm"], _deploys("The server to deploy.")] = "ridgeline"
    model: Annotated[str, _deploys("The model to serve.", metavar="MODEL")] = DEFAULT_MODEL
    name: Annotated[
        str, _deploys("Name that the names of all parts begin with.", metavar="NAME")
    ] = "ridgeline"
    image: Annotated[
        str | None,
        _deploys(
            "Image of the server.",
            metavar="IMAGE",
            unset="ridgeline:latest, which the Dockerfile of the repository builds, or a release "
            "of vllm/vllm-openai",
        ),
    ] = None
    gateway_image: Annotated[
        str | None,
        _deploys(
            "Image of the gateway, whose entry point is ridgeline.",
            metavar="IMAGE",
            unset="Ridgeline's --image, else ridgeline:latest",
        ),
    ] = None
    replicas: Annotated[int, _deploys("Servers to start.", unit=COUNT, range=Range(1, 1000))] = 2
    max_replicas: Annotated[
        int | None,
        _deploys(
            "Servers at most, as the load needs them (kustomize and helm, by KEDA).",
            unit=COUNT,
            range=Range(2, 1000),
            unset="as many as --replicas",
        ),
    ] = None
    cpus: Annotated[int, _deploys("CPUs of a server.", unit=COUNT, range=Range(1, 1024))] = 4
    memory_gib: Annotated[
        int, _deploys("Memory of a server, in GiB.", unit=COUNT, range=Range(1, 65536))
    ] = 8
    gpus: Annotated[
        int | None,
        _deploys(
            "GPUs of a server.", unit=COUNT, range=Range(0, 64), unset="0 for Ridgeline, 1 for vLLM"
        ),
    ] = None
    cache_gib: Annotated[
        int | None,
        _deploys(
            "Volume that keeps the models of a server, in GiB (kustomize and helm).",
            unit=COUNT,
            range=Range(1, 65536),
            unset="none: a server that is started again downloads its model",
        ),
    ] = None
    namespace: Annotated[
        str | None,
        _deploys(
            "Namespace of Kubernetes (kustomize).",
            metavar="NAME",
            unset="kubectl's; default with --max-replicas",
        ),
    ] = None
    instance_type: Annotated[
        str | None,
        _deploys(
            "SageMaker's instance type.",
            metavar="TYPE",
            unset="ml.c7i.4xlarge, ml.g6.2xlarge for vLLM",
        ),
    ] = None
    slo_classes: Annotated[
        str, _deploys("SLOs by request class, as of serve.", metavar="CLASSES")
    ] = ""
    serve_args: Annotated[
        str,
        _deploys("Further flags of the server, in one word: '--max-num-seqs 64'.", metavar="FLAGS"),
    ] = ""
    out: Annotated[Path, _deploys("Folder to write to.", metavar="DIR", path="output")] = Path(
        "deploy"
    )
    json: Annotated[bool, shared.JSON.but(panel="Output", since="0.3")] = False
