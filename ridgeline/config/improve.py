"""Options of the commands that make a model or a deployment better: optimize, quantize,
train-drafter, eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from ridgeline.config import shared
from ridgeline.config.option import About, Section
from ridgeline.config.shared import QuantizeMethod
from ridgeline.config.units import (
    COUNT,
    DURATION,
    MAX_COUNT,
    MILLISECONDS,
    NON_NEGATIVE_COUNT,
    NUMBER,
    POSITIVE_DOLLARS,
    TOKENS,
    Range,
)

OPTIMIZE_SLO = "ttft:500 tpot:50 error:1%"
Goal = Literal["goodput", "latency", "cost"]
PlaybookName = Literal[
    "latency-api", "throughput", "batch", "long-context", "long-output", "out-of-memory"
]
ServerKind = Literal["vllm", "llama-server", "sglang", "trtllm", "tgi", "ridgeline"]
NumberFormat = Literal["int", "q4_k", "q6_k", "nf4", "fp8-tensor", "fp8-channel", "fp8-block"]
CheckpointFormat = Literal[
    "ridgeline", "compressed-tensors", "gptq", "awq", "gguf", "fp8", "bitsandbytes"
]


EVAL_CMD = About(
    'Your own evaluation, with {url}: exit code, or a number or {"score": …} printed last.',
    metavar="COMMAND",
    ambient=False,
    since="0.3",
)
EVAL_MARGIN = About(
    "By how much the score of --eval-cmd may drop.",
    unit=NUMBER,
    range=Range(0, 1e9),
    ambient=False,
    since="0.3",
)


class OptimizeOptions(Section, frozen=True, kw_only=True):
    """A search for the best configuration: load, SLO, objective and budget (seconds)."""

    title: ClassVar[str] = "Search"
    table: ClassVar[str] = "optimize"
    prefix: ClassVar[str] = "optimize_"

    model: Annotated[str | None, shared.OPTIONAL_MODEL] = None
    workload: Annotated[str, shared.WORKLOAD] = "chat-and-code"
    slo: Annotated[str, shared.SLO_TEXT] = OPTIMIZE_SLO
    objective: Annotated[Goal, About("What to improve.")] = "goodput"
    playbook: Annotated[
        PlaybookName | None,
        About(
            "Workload, SLO, objective and order of rungs for a goal, with a checklist at the end; "
            "options that you give win.",
            ambient=False,
            since="0.3",
        ),
    ] = None
    budget: Annotated[float, About("Time to spend.", unit=DURATION, unset="5m")] = 300.0
    price_per_hour: Annotated[
        float | None,
        shared.PRICE_PER_HOUR.but(range=POSITIVE_DOLLARS, unset="a notional $1"),
    ] = None
    output: Annotated[
        Path,
        About("Folder for the report and ridgeline.toml.", short="-o", path="folder"),
    ] = Path("ridgeline-out")
    json: Annotated[
        bool, shared.JSON.but(help="Print JSON instead of text, as in ladder.json.")
    ] = False
    ladder: Annotated[
        Path | None, About("TOML file of candidates, in place of the built-in.", path="input")
    ] = None
    calibration: Annotated[
        Path | None,
        About("Predict with this file of `ridgeline calibrate`.", path="input"),
    ] = None
    resume: Annotated[
        Path | None,
        About(
            "Continue the interrupted search whose results are in this folder; the other options "
            "as before; the budget may be larger.",
            path="folder",
            ambient=False,
        ),
    ] = None
    shared_machine: Annotated[
        bool,
        About(
            "Count runs during which other work took the CPU, for machines that are never quiet; "
            "the intervals contain its noise.",
            ambient=False,
        ),
    ] = False


class TargetServerOptions(Section, frozen=True, kw_only=True):
    """Another server to optimise: its address, how to start it, and which kind it is."""

    title: ClassVar[str] = "Another server"

    url: Annotated[
        str | None,
        shared.URL.but(help="Optimise the server at this address: 'http://127.0.0.1:{port}'."),
    ] = None
    restart_cmd: Annotated[
        str | None,
        About(
            "Command that starts it; {flags} and {port} are filled in.",
            metavar="COMMAND",
            ambient=False,
        ),
    ] = None
    apply_cmd: Annotated[
        str | None,
        About(
            "Command that applies a configuration: RIDGELINE_FLAGS, or JSON in RIDGELINE_CONFIG.",
            metavar="COMMAND",
            ambient=False,
            since="0.3",
        ),
    ] = None
    server_cmd: Annotated[
        str | None,
        About(
            "Command line that the server runs with now, for --apply-cmd and --advise.",
            metavar="COMMAND",
            ambient=False,
            since="0.3",
        ),
    ] = None
    docker: Annotated[
        str | None,
        About(
            "Container to run with other flags (docker or podman).",
            metavar="CONTAINER",
            ambient=False,
            since="0.3",
        ),
    ] = None
    kubernetes: Annotated[
        str | None,
        About(
            "Deployment or StatefulSet to patch: NAMESPACE/NAME, NAMESPACE/statefulset/NAME. With "
            "{service} or {port} in --url a copy is changed.",
            metavar="NAMESPACE/NAME",
            ambient=False,
            since="0.3",
        ),
    ] = None
    slurm: Annotated[
        Path | None,
        About(
            "Job script with {flags} to submit; {node} in --url is the job's node.",
            path="input",
            ambient=False,
            since="0.3",
        ),
    ] = None
    ray: Annotated[
        Path | None,
        About(
            "Ray Serve configuration that is deployed, of one LLM.",
            path="input",
            ambient=False,
            since="0.3",
        ),
    ] = None
    ready_url: Annotated[
        str | None,
        About(
            "Address that answers once a configuration is up.",
            metavar="URL",
            unset="/v1/models of --url",
            ambient=False,
            since="0.3",
        ),
    ] = None
    server: Annotated[
        ServerKind | None,
        About("Kind of server.", unset="recognised by its command", ambient=False),
    ] = None
    served_model_name: Annotated[str | None, shared.SERVED_MODEL_NAME] = None
    eval_cmd: Annotated[
        str | None,
        EVAL_CMD.but(
            help="Your own quality gate of lossy changes, with {url}: exit code or score."
        ),
    ] = None
    eval_margin: Annotated[float, EVAL_MARGIN] = 0.0
    candidate_model: Annotated[
        tuple[str, ...],
        About(
            "Checkpoint to try in place of the model, such as a quantised one; repeatable.",
            metavar="MODEL",
            ambient=False,
            since="0.3",
        ),
    ] = ()
    candidate_drafter: Annotated[
        tuple[str, ...],
        About(
            "Drafter to try: eagle3:CHECKPOINT, eagle:CHECKPOINT, draft:CHECKPOINT, mtp; "
            "repeatable.",
            metavar="DRAFTER",
            ambient=False,
            since="0.3",
        ),
    ] = ()
    candidate_cmd: Annotated[
        tuple[str, ...],
        About(
            "Another command that starts it, such as prefill and decode apart; {flags} and {port} "
            "are filled in; repeatable.",
            metavar="COMMAND",
            ambient=False,
            since="0.3",
        ),
    ] = ()
    gpus: Annotated[
        int | None,
        About(
            "GPUs that tensor parallelism and replicas may use.",
            unit=COUNT,
            unset="as the command has it",
            ambient=False,
        ),
    ] = None
    accelerator: Annotated[str | None, shared.SERVER_ACCELERATOR] = None
    api_key: Annotated[str | None, shared.API_KEY] = None
    start_timeout: Annotated[
        float, About("Maximum time for a start.", unit=DURATION, unset="10m", ambient=False)
    ] = 600.0
    compile_cache: Annotated[
        str | None,
        About(
            "Where compiled kernels are kept from start to start: a folder, for --docker also "
            "volume:NAME; for a copy on Kubernetes pvc:CLAIM or host:/FOLDER; or none.",
            metavar="PLACE",
            unset="a volume for --docker, else where the server keeps them",
            ambient=False,
            since="0.3",
        ),
    ] = None


class RehearsalOptions(Section, frozen=True, kw_only=True):
    """Showing what a search would do to a server, without doing it."""

    title: ClassVar[str] = "Another server"

    dry_run: Annotated[
        bool,
        About(
            "Print the commands that would change the server, and change nothing.",
            ambient=False,
            since="0.3",
        ),
    ] = False
    rbac: Annotated[
        bool,
        About(
            "Print the rights in the cluster that --kubernetes needs, as a manifest, and do "
            "nothing.",
            ambient=False,
            since="0.3",
        ),
    ] = False
    advise: Annotated[
        bool,
        About(
            "Measure the server as it runs, and rank changes by their predicted gain.",
            ambient=False,
            since="0.3",
        ),
    ] = False


class QuantizeFiles(Section, frozen=True, kw_only=True):
    """The model to quantise, and where the result goes."""

    title: ClassVar[str] = "Files"

    model: Annotated[str, shared.MODEL]
    output: Annotated[
        Path,
        About(
            "Empty folder for the result.",
            short="-o",
            path="folder",
            required=True,
            ambient=False,
        ),
    ]
    json: Annotated[bool, shared.JSON.but(panel="Output", since="0.3")] = False


class QuantizeOptions(Section, frozen=True, kw_only=True):
    """How a checkpoint is written in fewer bits. None: the method or the bits decide."""

    title: ClassVar[str] = "Quantisation"
    table: ClassVar[str] = "quantize"
    prefix: ClassVar[str] = "quantize_"

    method: Annotated[
        QuantizeMethod | None,
        About(
            "rtn and hqq need no text; gptq, awq, smoothquant and llm-int8 (8 bits) calibrate; "
            "qat trains.",
            unset="gptq at 3 to 5 bits, else rtn",
        ),
    ] = None
    bits: Annotated[Literal[3, 4, 5, 8, 16], About("Bits per weight of the layers.")] = 4
    bits_budget: Annotated[
        float | None,
        About(
            "Mean bits per weight, e.g. 5; sensitive layers get more, others fewer.",
            metavar="BITS",
            unit=NUMBER,
            range=Range(0, 64, exclusive=True),
        ),
    ] = None
    step_budget: Annotated[
        float | None,
        About(
            "The same, by speed: time to read the weights of a decode step.",
            unit=MILLISECONDS,
            range=Range(0, 1e12, exclusive=True),
        ),
    ] = None
    group_size: Annotated[
        int | None,
        About("3 and 4 bits: inputs that share a scale: 32, 64 or 128.", unit=COUNT, unset="128"),
    ] = None
    zeros: Annotated[
        bool,
        About("3 and 4 bits: store a zero-point per group too.", flag="asym", negative="--sym"),
    ] = False
    numbers: Annotated[
        NumberFormat,
        About(
            "Number format: int; q4_k, q6_k (gguf); nf4 (bitsandbytes); fp8-tensor, fp8-channel "
            "(compressed-tensors); fp8-block (fp8)."
        ),
    ] = "int"
    rotate: Annotated[bool, About("Rotate the model by R1 and R2 first (QuaRot).")] = False
    lm_head_bits: Annotated[
        Literal[4, 8, 16] | None, About("Bits of the LM head.", unset="as stored")
    ] = None
    embedding_bits: Annotated[
        Literal[4, 8] | None,
        About("Bits of the embedding table, and of an LM head tied to it.", unset="as stored"),
    ] = None
    outlier_threshold: Annotated[
        float | None,
        About(
            "llm-int8: inputs of at least this magnitude stay unquantised.",
            unit=NUMBER,
            range=Range(0, 1e6, exclusive=True),
            unset="6",
        ),
    ] = None
    format: Annotated[
        CheckpointFormat,
        About("Checkpoint format; ridgeline is packed for this engine's kernels."),
    ] = "ridgeline"
    calibration_text: Annotated[
        Path | None,
        About(
            "Text to measure activations on.",
            panel="Calibration and training",
            old_names=("calibration",),
            path="input",
            unset="built-in text",
            since="0.2",
        ),
    ] = None
    calibration_windows: Annotated[
        int | None, About("Windows of text to read.", unit=COUNT, unset="64; awq 32")
    ] = None
    calibration_tokens: Annotated[
        int | None, About("Tokens per window.", unit=TOKENS, unset="256")
    ] = None
    steps: Annotated[int | None, About("qat: training steps.", unit=COUNT, unset="200")] = None
    seed: Annotated[int, shared.SEED_OF_ALL.but(help="Seed of the windows and of --rotate.")] = 0

    @property
    def calibration_flags(self) -> list[str]:
        """The flags about the text, of those that were set."""
        given = {
            "--calibration-text": self.calibration_text,
            "--calibration-windows": self.calibration_windows,
            "--calibration-tokens": self.calibration_tokens,
        }
        return [flag for flag, value in given.items() if value is not None]

    @property
    def has_budget(self) -> bool:
        """Whether a budget chooses the bits of each layer."""
        return self.bits_budget is not None or self.step_budget is not None


class TrainDrafterFiles(Section, frozen=True, kw_only=True):
    """The model to train a drafter for, and where the drafter goes."""

    title: ClassVar[str] = "Files"

    model: Annotated[str, shared.MODEL]
    output: Annotated[
        Path,
        About(
            "Empty folder for the drafter.",
            short="-o",
            path="folder",
            required=True,
            ambient=False,
        ),
    ]
    json: Annotated[bool, shared.JSON.but(panel="Output", since="0.3")] = False


class TrainDrafterOptions(Section, frozen=True, kw_only=True):
    """How a drafter is trained."""

    title: ClassVar[str] = "Training"
    table: ClassVar[str] = "train-drafter"
    prefix: ClassVar[str] = "train_drafter_"

    kind: Annotated[
        Literal["medusa", "eagle"],
        About("medusa: heads on the last hidden state; eagle: one autoregressive layer."),
    ] = "medusa"
    text: Annotated[
        Path | None, About("Text to train on.", path="input", unset="built-in text")
    ] = None
    own_tokens: Annotated[
        int | None,
        About(
            "Tokens generated by the model itself to train on in addition.",
            unit=TOKENS,
            range=NON_NEGATIVE_COUNT,
            unset="65,536; 0 with --chat-prompts",
        ),
    ] = None
    chat_prompts: Annotated[
        int,
        About(
            "User messages that the model writes itself. The drafter is trained on the model's "
            "greedy answers to them, in place of the built-in text.",
            unit=COUNT,
            range=NON_NEGATIVE_COUNT,
            since="0.3",
        ),
    ] = 0
    heads: Annotated[
        int | None,
        About("medusa: draft tokens per step.", unit=COUNT, range=Range(1, 16), unset="4"),
    ] = None
    steps: Annotated[int, About("Training steps.", unit=COUNT)] = 400
    batch_size: Annotated[
        int, About("Sequences per step.", unit=COUNT, old_names=("batch",), since="0.2")
    ] = 8
    tokens: Annotated[
        int, About("Tokens per sequence.", unit=TOKENS, range=Range(16, MAX_COUNT))
    ] = 128
    learning_rate: Annotated[
        float,
        About(
            "Peak learning rate.",
            unit=NUMBER,
            range=Range(0, 1, exclusive=True),
            since="0.2",
        ),
    ] = 2e-3
    seed: Annotated[
        int, shared.SEED_OF_ALL.but(help="Seed of the sequences and the initial weights.")
    ] = 0


class EvaluateOptions(Section, frozen=True, kw_only=True):
    """Two models to compare by their outputs."""

    title: ClassVar[str] = "Evaluation"
    table: ClassVar[str] = "eval"
    prefix: ClassVar[str] = "eval_"

    a: Annotated[
        str, shared.MODEL.but(help="The original, by any name of a model.", required=False)
    ] = ""
    b: Annotated[
        str, shared.MODEL.but(help="The candidate; engine flags apply to it.", required=False)
    ] = ""
    budget: Annotated[float, About("Time to spend.", unit=DURATION, unset="2m")] = 120.0
    lm_eval: Annotated[
        str | None,
        About(
            "lm-eval tasks to run on both models, separated by commas.",
            panel="Tasks of lm-eval",
            metavar="TASKS",
        ),
    ] = None
    lm_eval_path: Annotated[
        Path | None,
        About("Folder of YAML files with your own tasks.", metavar="FOLDER", path="input"),
    ] = None
    lm_eval_limit: Annotated[
        int | None,
        About("Maximum documents per task.", unit=COUNT, range=Range(2, MAX_COUNT), unset="all"),
    ] = None
    lm_eval_program: Annotated[
        str | None,
        About("lm-eval executable, where it is installed in another environment.", metavar="PATH"),
    ] = None
    json: Annotated[bool, shared.JSON.but(panel="Output")] = False


class EvaluateServersOptions(Section, frozen=True, kw_only=True):
    """Two servers to compare by their answers, in place of two models."""

    title: ClassVar[str] = "Servers"

    url: Annotated[
        tuple[str, ...],
        About(
            "Address of a server; given twice, the first is the original.",
            metavar="URL",
            ambient=False,
            since="0.3",
        ),
    ] = ()
    server: Annotated[
        Literal["vllm", "llama-server", "sglang", "tgi", "ridgeline", "openai"] | None,
        About("Kind of both servers.", unset="recognised", ambient=False, since="0.3"),
    ] = None
    served_model_name: Annotated[str | None, shared.SERVED_MODEL_NAME] = None
    api_key: Annotated[str | None, shared.API_KEY] = None
    eval_cmd: Annotated[str | None, EVAL_CMD] = None
    eval_margin: Annotated[float, EVAL_MARGIN] = 0.0
