"""The commands of `ridgeline`: what each is for, and which sections of options it takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from ridgeline.config.compression import DistillFiles, DistillOptions, PruneFiles, PruneOptions
from ridgeline.config.improve import (
    EvaluateOptions,
    EvaluateServersOptions,
    OptimizeOptions,
    QuantizeFiles,
    QuantizeOptions,
    RehearsalOptions,
    TargetServerOptions,
    TrainDrafterFiles,
    TrainDrafterOptions,
)
from ridgeline.config.load import (
    BenchOptions,
    BenchReport,
    BenchTarget,
    DiagnoseOptions,
    LabOptions,
    PredictOptions,
    WatchOptions,
)
from ridgeline.config.option import About, Option, Section, options_of
from ridgeline.config.planning import (
    CalibrateOptions,
    CapacityOptions,
    CostOptions,
    PackOptions,
    PlanOptions,
    SimulateOptions,
)
from ridgeline.config.server import (
    CanaryOptions,
    FallbackOptions,
    RouteOptions,
    ServeModel,
    ServerOptions,
    TwinOptions,
    TwinServerOptions,
)
from ridgeline.config.settings import Settings
from ridgeline.config.tools import (
    BatchFileOptions,
    CatalogueOptions,
    ChatOptions,
    CompareOptions,
    CompletionOptions,
    DeployOptions,
    DoctorOptions,
    ExplainOptions,
    FleetOptions,
    GenerateOptions,
    InspectOptions,
    MockServerOptions,
    ModelsOptions,
    NewKeyOptions,
    OperateOptions,
    PullOptions,
    TopOptions,
    VersionOptions,
)

Group = Literal["Run", "Measure", "Improve", "Plan", "Tools"]


MAX_SHOWN_FLAGS = 28  # with --debug and --help, 30 in a command's help
"""Flags in `ridgeline COMMAND --help`; a command with more hides its RARE ones."""

RARE = frozenset(
    (  # of the engine
        *("lm_head_quantization", "activations", "prefix_cache_ttl_s", "enable_chunked_prefill"),
        "async_scheduling",
        *("prefix_pin_share", "kv_tier_memory", "kv_tier_dir", "kv_tier_size", "kv_tier_url"),
        *("disaggregation_mode", "disaggregation_host", "disaggregation_port"),
        *("disaggregation_transfer_backend", "disaggregation_peers", "disaggregation_timeout_s"),
        *("batching", "batch_wait_ms", "background_tokens", "max_num_queued_reqs", "slo_throttle"),
        *("max_num_queued_tokens", "thread_plan", "block_size", "max_num_batched_tokens"),
        *("attention_backend", "layer_backend", "num_threads_decode", "kv_eviction_config"),
        *("lora_modules", "max_loras", "max_lora_rank"),
        *("kv_tier_memory_bandwidth", "kv_tier_file_bandwidth"),
        *("pipeline_parallel_size", "expert_parallel_size", "context_parallel_size"),
        "sequence_parallel",
        *("collectives", "nnodes", "node_rank", "master_addr"),
        *("enable_lora", "named_model"),
        # of the server
        *("enable_per_request_metrics", "stream_interval", "max_body_bytes", "admin_port"),
        *("max_num_connections", "shutdown_timeout_s", "batch_store_max_bytes", "batch_window"),
        *("default_slo_class", "allowed_origins", "requests_per_minute", "tokens_per_minute"),
        *("speed", "acceptance", "generation_config", "warm_prompts"),
        *("response_cache_size", "response_cache_ttl", "reasoning_config"),
        *("semantic_cache_pairs", "semantic_cache_max_false_hits"),
        *("allow_runtime_lora_updating", "otlp_endpoint", "emf_file"),
        # of the gateway
        *("canary_alpha", "canary_max_disagreement", "canary_max_slowdown", "canary_min_tokens"),
        *("close_on_stop", "stream_silence_s"),
        *("canary_min_sessions", "fallback_input_price", "fallback_output_price"),
        # of a plan or a simulation
        *("response_cache_share", "semantic_cache_share", "question_len"),
        *("pinned_len", "pinned_prefixes"),
        # of a load
        *("endpoint", "ignore_eos", "stream", "timeout_s", "burstiness", "replay_speed"),
        *("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps", "duration_s", "prefix_len"),
        *("percentile_metrics", "metric_percentiles", "num_warmups", "warmup_s", "cooldown_s"),
        *("layout", "log", "trace", "price_per_hour"),
        # of an optimisation
        *("ready_url", "start_timeout", "dry_run", "shared_machine", "slurm", "ray", "calibration"),
        *("eval_margin", "server_cmd", "ladder", "resume", "served_model_name", "server"),
        *("candidate_drafter", "candidate_cmd", "compile_cache", "rbac"),
        *("kv_cache_memory_bytes", "output_json", "sweep"),
        *("gpus", "candidate_model", "eval_cmd"),
        # of a diagnosis
        *("nsight", "baseline"),
        # of a plan
        *("traffic_duration", "kv_tier_memory_share", "kv_tier_file_share"),
        *("interconnect", "network", "node_label", "ray_image"),
        # of a simulation
        *("off_peak", "batch_share", "repair_s", "startup_s", "target_in_flight", "num_workers"),
        *("step_by_step", "catalogue", "completion_window", "batch_rate", "mean_request_rate"),
        # of a prediction
        *("what_if", "thinking_len", "thinking_token_budget", "beam_width", "embedding_bits"),
        *("quantization_method", "draft_share", "enforce_eager", "structured_share"),
        *("token_rules_share", "dropped_context_share", "document_len", "keep_ratio"),
        *("new_document_share", "fallback_share", "canary_shadow_share"),
    )
)
"""Options that most users never set: shown by `--help-all` where a command has many."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A subcommand.

    `summary` is its line in `ridgeline --help`; `details` and `examples` stand in its own help.
    """

    name: str
    group: Group
    summary: str
    details: str = ""
    examples: tuple[str, ...] = ()
    sections: tuple[type[Section], ...] = ()

    @property
    def options(self) -> dict[str, Option]:
        """Every option of the command line, by name."""
        return {
            name: option
            for section in self.all_sections
            for name, option in options_of(section).items()
            if option.on_command_line
        }

    @property
    def hidden(self) -> frozenset[str]:
        """Names of the options that only `--help-all` shows."""
        flags = {name for name, option in self.options.items() if option.has_flag}
        return RARE & flags if len(flags) > MAX_SHOWN_FLAGS else frozenset()

    @property
    def all_sections(self) -> tuple[type[Section], ...]:
        """Its sections, with that of `--config` where a file can set any of their options."""
        reads_file = any(section.table for section in self.sections)
        return (*self.sections, *((ConfigFile,) if reads_file else ()))


class ConfigFile(Section, frozen=True, kw_only=True):
    """Where options are read from besides the command line."""

    title: ClassVar[str] = "Configuration"

    config: Annotated[
        Path | None,
        About(
            "Read options from this TOML file; flags and RIDGELINE_* variables override it.",
            path="input",
            ambient=False,
        ),
    ] = None


_COMMANDS = (
    Command(
        name="serve",
        group="Run",
        summary="Serve a model over the OpenAI API.",
        details="Also serves the Anthropic API, a chat page, and Prometheus metrics. --twin "
        "simulates a device that is not here, and needs no weights.",
        examples=(
            "ridgeline serve demo",
            "ridgeline serve ./model --quantization int8",
            "ridgeline serve llama-3.1-8b --twin --device h100-sxm",
        ),
        sections=(ServeModel, ServerOptions, TwinOptions, Settings),
    ),
    Command(
        name="route",
        group="Run",
        summary="Route requests to several servers; lose none if one fails.",
        details="A gateway for Ridgeline's servers and any other with the OpenAI API. Behind "
        "Ridgeline, another server continues the stream of one that was killed, byte by byte; "
        "behind other servers it ends in an error event. --canary compares a new version, "
        "gives it traffic step by step, and rolls it back if it is worse.",
        examples=(
            "ridgeline route --backend http://10.0.0.7:8000 --backend http://10.0.0.8:8000",
            "ridgeline route --backend http://10.0.0.7:8000 --canary http://10.0.0.9:8000",
        ),
        sections=(RouteOptions, CanaryOptions, FallbackOptions),
    ),
    Command(
        name="chat",
        group="Run",
        summary="Chat with a model, here or on a server.",
        details="Each line of input is one message; /help lists the commands, Ctrl-C stops an "
        "answer, Ctrl-D leaves. Prints the time to first token and the speed of every answer. "
        "MODEL runs in this process; --url talks to a server.",
        examples=(
            "ridgeline chat",
            "ridgeline chat Qwen/Qwen3-0.6B --quantization int8",
            "ridgeline chat --url http://127.0.0.1:8000",
        ),
        sections=(ChatOptions, Settings),
    ),
    Command(
        name="generate",
        group="Run",
        summary="Answer one prompt on the terminal.",
        examples=('ridgeline generate demo "def fib(n):" --max-tokens 64',),
        sections=(GenerateOptions, Settings),
    ),
    Command(
        name="batch",
        group="Run",
        summary="Answer a file of requests, without a server.",
        details="An interrupted run continues where it stopped when the command is repeated.",
        examples=("ridgeline batch requests.jsonl -o answers.jsonl --model demo",),
        sections=(BatchFileOptions, Settings),
    ),
    Command(
        name="pull",
        group="Run",
        summary="Download a model.",
        details="Continues an interrupted download, and looks for a newer commit of a branch. "
        "Other commands download the model they name if it is not here. HF_TOKEN, HF_HOME, "
        "HF_ENDPOINT and HF_HUB_OFFLINE apply.",
        examples=(
            "ridgeline pull smollm2",
            "ridgeline pull Qwen/Qwen3-0.6B",
            "ridgeline pull hf:OWNER/REPO@REVISION",
            "ridgeline pull OWNER/REPO:Q4_K_M",
        ),
        sections=(PullOptions,),
    ),
    Command(
        name="models",
        group="Run",
        summary="List downloaded models, or published ones that fit.",
        examples=("ridgeline models", "ridgeline models --fit"),
        sections=(ModelsOptions,),
    ),
    Command(
        name="new-key",
        group="Run",
        summary="Create an API key for `serve --api-keys-file`.",
        examples=("ridgeline new-key alice",),
        sections=(NewKeyOptions,),
    ),
    Command(
        name="bench",
        group="Measure",
        summary="Measure an engine here, or any OpenAI-compatible server.",
        details="Reports latencies, throughput and goodput, and what bounds them. MODEL runs in "
        "this process; --url measures a server.",
        examples=(
            "ridgeline bench demo --request-rate 4 --slo ttft:200 tpot:50",
            "ridgeline bench --url http://127.0.0.1:8000 --num-prompts 200",
        ),
        sections=(BenchTarget, BenchOptions, BenchReport, Settings),
    ),
    Command(
        name="diagnose",
        group="Measure",
        summary="Find what limits latency, and the setting that helps.",
        details="Measures an engine here (MODEL) or a server (--url), or reads a recorded run "
        "(--run); ranks what latency is lost to. --profile times each operator instead.",
        examples=(
            "ridgeline diagnose --url http://127.0.0.1:8000",
            "ridgeline diagnose --run run.jsonl",
        ),
        sections=(DiagnoseOptions, BenchOptions, Settings),
    ),
    Command(
        name="lab",
        group="Measure",
        summary="Measure one technique after another on a model.",
        details="casestudy decodes the same prompts with eager PyTorch, torch.compile, "
        "Ridgeline's kernels, INT8 weights, INT4 weights, and INT4 with speculation, in "
        "interleaved rounds: tok/s, achieved bandwidth, MBU, and what each stage changes in the "
        "results. A stage that cannot run here says why.",
        examples=(
            "ridgeline lab casestudy smollm2 --device cpu",
            "ridgeline lab casestudy dummy:llama-3.1-8b --device cuda --html study.html",
        ),
        sections=(LabOptions,),
    ),
    Command(
        name="compare",
        group="Measure",
        summary="Compare two results; exit code 1 if B regressed.",
        details="Exit code 3 if the results are inconclusive.",
        examples=("ridgeline compare before.json after.json --threshold 3",),
        sections=(CompareOptions,),
    ),
    Command(
        name="top",
        group="Measure",
        summary="Watch the metrics of a running server.",
        details="Requests, speed, latencies, KV blocks, cache hits and batch requests; q quits, "
        "? explains the figures.",
        examples=("ridgeline top --url http://127.0.0.1:8000",),
        sections=(TopOptions,),
    ),
    Command(
        name="optimize",
        group="Improve",
        summary="Find the fastest configuration, and prove it.",
        details="Tries one technique at a time: measures, diagnoses, applies, verifies quality, "
        "and keeps only proven improvements. Optimises the engine here (MODEL), or a server that "
        "--restart-cmd starts, or one that runs in a container, on Kubernetes, Slurm or Ray Serve. "
        "Writes a report and a ridgeline.toml.",
        examples=(
            "ridgeline optimize demo --budget 5m",
            "ridgeline optimize --url 'http://127.0.0.1:{port}' \\\n"
            "    --restart-cmd 'vllm serve ./model --port {port} {flags}'",
            "ridgeline optimize ./model --url http://chat --kubernetes prod/chat",
        ),
        sections=(OptimizeOptions, TargetServerOptions, RehearsalOptions, Settings),
    ),
    Command(
        name="watch",
        group="Improve",
        summary="Say when a tuned server's traffic has drifted.",
        details="Compares the live traffic's shape, from the server's metrics, with the workload "
        "that optimize tuned for, and predicts which change would now gain. Changes nothing, sends "
        "no load, reads no prompt. The exit code is 1 if the traffic has drifted.",
        examples=(
            "ridgeline watch --url http://chat:8000 --tuned out",
            "ridgeline watch --url http://chat:8000 --tuned /tuned --cronjob > watch.yaml",
        ),
        sections=(WatchOptions,),
    ),
    Command(
        name="quantize",
        group="Improve",
        summary="Write a checkpoint in fewer bits.",
        details="An interrupted run continues where it stopped when the command is repeated.",
        examples=("ridgeline quantize ./model -o ./model-int4",),
        sections=(QuantizeFiles, QuantizeOptions),
    ),
    Command(
        name="prune",
        group="Improve",
        summary="Remove layers, channels, heads or weights.",
        details="Fewer layers, channels or heads make a smaller dense model; zeroed weights save "
        "no time here. An interrupted run continues where it stopped when the command is repeated.",
        examples=(
            "ridgeline prune ./model -o ./smaller --drop-layers 6 --drop-channels 0.25",
            "ridgeline prune ./model -o ./sparse --sparsity 2:4 --method sparsegpt \\\n"
            "    --format sparse-24",
        ),
        sections=(PruneFiles, PruneOptions),
    ),
    Command(
        name="distill",
        group="Improve",
        summary="Train a smaller model to answer as a larger one.",
        details="Repairs a pruned model, or teaches any model of the same vocabulary. Reports the "
        "loss curve, and quality and speed next to the teacher in INT4. An interrupted run "
        "continues where it stopped when the command is repeated.",
        examples=(
            "ridgeline distill --from-pruned ./smaller -o ./tuned --text corpus.txt",
            "ridgeline distill --teacher ./large --student ./small -o ./tuned",
        ),
        sections=(DistillFiles, DistillOptions),
    ),
    Command(
        name="train-drafter",
        group="Improve",
        summary="Train a drafter for speculative decoding.",
        details="An interrupted run continues where it stopped when the command is repeated.",
        examples=("ridgeline train-drafter ./model -o ./drafter --kind eagle",),
        sections=(TrainDrafterFiles, TrainDrafterOptions),
    ),
    Command(
        name="eval",
        group="Improve",
        summary="Compare a candidate's outputs with the original's.",
        details="Two models, A and B, or two servers that run, --url twice. Exit code 1 unless the "
        "candidate passes.",
        examples=(
            "ridgeline eval ./model ./model-int4 --budget 5m",
            "ridgeline eval --url http://a:8000 --url http://b:8000 \\\n"
            "    --eval-cmd 'pytest evals --url {url}'",
        ),
        sections=(EvaluateOptions, EvaluateServersOptions, Settings),
    ),
    Command(
        name="plan",
        group="Plan",
        summary="Choose hardware and a fleet for a demand and an SLO.",
        details="Searches devices, parallelism, formats and replicas; prints costs with intervals "
        "and the commands to start it.",
        examples=("ridgeline plan llama-3.1-8b --request-rate 20 --slo ttft:500 tpot:40",),
        sections=(PlanOptions,),
    ),
    Command(
        name="predict",
        group="Plan",
        summary="Predict latency and throughput from arithmetic alone.",
        details="`--explain`, or `ridgeline explain predict`, shows the terms that the predicted "
        "times are made of.",
        examples=("ridgeline predict llama-3.1-8b --accelerator h100-sxm --max-concurrency 32",),
        sections=(PredictOptions,),
    ),
    Command(
        name="simulate",
        group="Plan",
        summary="Simulate a fleet with the engine's own scheduler.",
        examples=("ridgeline simulate llama-3.1-8b --accelerator h100-sxm --request-rate 10",),
        sections=(SimulateOptions,),
    ),
    Command(
        name="cost",
        group="Plan",
        summary="Compare the cost of a fleet with API providers.",
        examples=("ridgeline cost llama-3.1-8b --accelerator h100-sxm --request-rate 5",),
        sections=(CostOptions,),
    ),
    Command(
        name="capacity",
        group="Plan",
        summary="Show which devices hold a model, and how many sequences.",
        examples=(
            "ridgeline capacity llama-3.1-70b",
            "ridgeline capacity llama-3.1-8b --accelerator l4 --quantization int4",
        ),
        sections=(CapacityOptions,),
    ),
    Command(
        name="catalogue",
        group="Plan",
        summary="List accelerators and what they cost to rent.",
        details="Every figure has a source and a date; a price older than a year is not planned "
        "with. --update downloads the day's prices.",
        examples=(
            "ridgeline catalogue",
            "ridgeline catalogue h100-sxm",
            "ridgeline catalogue --update --output prices.toml",
        ),
        sections=(CatalogueOptions,),
    ),
    Command(
        name="pack",
        group="Plan",
        summary="Place several models on a stock of devices.",
        examples=("ridgeline pack models.toml --accelerator h100-sxm=2,l4=4",),
        sections=(PackOptions,),
    ),
    Command(
        name="calibrate",
        group="Plan",
        summary="Measure this machine or a server, to predict with.",
        details="Up to five short runs. Other planning commands and optimize take the file with "
        "--calibration.",
        examples=("ridgeline calibrate --engine ./model", "ridgeline calibrate --url http://host"),
        sections=(CalibrateOptions,),
    ),
    Command(
        name="explain",
        group="Tools",
        summary="Explain settings, techniques, metrics, flags or errors.",
        details="Of a model: every engine setting as it would be used and why, and which "
        "techniques would help here. Of a topic: what it means for this model and machine; "
        "`explain topics` lists them. `explain speculation` measures whether speculative decoding "
        "pays.",
        examples=("ridgeline explain demo", "ridgeline explain --max-num-seqs"),
        sections=(ExplainOptions, Settings),
    ),
    Command(
        name="inspect",
        group="Tools",
        summary="Show a model's parameters, FLOPs, bytes and KV cache.",
        details="Checks every layer of a quantised checkpoint; exit code 1 if one is faulty.",
        examples=(
            "ridgeline inspect demo",
            "ridgeline inspect dummy:llama-3.1-8b --what-if 'kv_heads=1 window=1024'",
        ),
        sections=(InspectOptions,),
    ),
    Command(
        name="doctor",
        group="Tools",
        summary="Check this machine and report problems.",
        examples=("ridgeline doctor",),
        sections=(DoctorOptions,),
    ),
    Command(
        name="mock-server",
        group="Tools",
        summary="Serve scripted answers, to test load generators.",
        details="The requested model name chooses the script.",
        examples=("ridgeline mock-server --list",),
        sections=(MockServerOptions,),
    ),
    Command(
        name="twin",
        group="Tools",
        summary="Simulate another inference server, without its devices.",
        details="Takes the command line of vLLM, SGLang, TensorRT-LLM, TGI or llama.cpp, and "
        "models what its flags do to step times, memory and start-up. Answers are synthetic. "
        "Options of the twin come before the server's program.",
        examples=(
            "ridgeline twin vllm serve llama-3.1-8b --max-num-seqs 64",
            "ridgeline optimize dummy:llama-3.1-8b --max-model-len 4096 \\\n"
            "    --url 'http://127.0.0.1:{port}' --workload synthetic:input=512,output=64 \\\n"
            "    --restart-cmd 'ridgeline twin vllm serve llama-3.1-8b --port {port} {flags}'",
        ),
        sections=(TwinServerOptions,),
    ),
    Command(
        name="operate",
        group="Tools",
        summary="Write alert rules and dashboards for a server.",
        details="For Ridgeline, vLLM, SGLang and TGI. Alerts on SLOs and on the causes that "
        "diagnose knows, with tests for promtool; the SLO classes are those of serve.",
        examples=(
            "ridgeline operate rules --slo-classes 'chat=ttft:500 tpot:50 attainment:0.99'",
            "ridgeline operate dashboards --server vllm --out grafana",
        ),
        sections=(OperateOptions,),
    ),
    Command(
        name="fleet",
        group="Run",
        summary="Run several servers and their gateway on Ray Serve.",
        details="Ray places the servers, restarts one that fails, and replaces them one after "
        "another when the file changes; streams go on. Needs the extra fleet.",
        examples=("ridgeline fleet up fleet.toml", "ridgeline fleet status"),
        sections=(FleetOptions,),
    ),
    Command(
        name="deploy",
        group="Tools",
        summary="Write files that deploy servers and a gateway.",
        details="docker: an image and a script. compose: for docker compose. kustomize: a "
        "StatefulSet of servers, a gateway, their Services and a disruption budget, for kubectl "
        "apply -k. helm: a chart of the same objects. kuberay: a RayJob that starts `ridgeline "
        "fleet`, or a RayService of vLLM. ecs, sagemaker: inputs of the AWS CLI, and a script.",
        examples=(
            "ridgeline deploy --for compose --model smollm2 --image ridgeline:0.3",
            "ridgeline deploy --for kustomize --replicas 4 --out k8s",
            "ridgeline deploy --for helm --server vllm --model OWNER/REPO --gpus 2",
        ),
        sections=(DeployOptions,),
    ),
    Command(
        name="completion",
        group="Tools",
        summary="Print a shell completion script.",
        examples=(
            'eval "$(ridgeline completion bash)"  # in ~/.bashrc',
            "ridgeline completion fish > ~/.config/fish/completions/ridgeline.fish",
        ),
        sections=(CompletionOptions,),
    ),
    Command(
        name="version",
        group="Tools",
        summary="Print the version.",
        sections=(VersionOptions,),
    ),
)
COMMANDS: Mapping[str, Command] = {command.name: command for command in _COMMANDS}
TABLES: Mapping[str, type[Section]] = {
    section.table: section for command in _COMMANDS for section in command.sections if section.table
}
"""The tables of a `ridgeline.toml`."""
