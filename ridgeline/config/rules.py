"""Which options make others meaningless, as data.

No option that was typed is ignored silently: one that would have no effect is an error. Only the
command line counts: a file or an environment variable may hold options for other occasions. What a
typed option needs may come from any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ridgeline.config.load import BenchOptions
from ridgeline.config.server import CanaryOptions, FallbackOptions
from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput


class Needs(msgspec.Struct, frozen=True):
    """`option` has no effect unless one of `others` is set."""

    option: str
    others: tuple[str, ...]


class Displaces(msgspec.Struct, frozen=True):
    """With `option`, the `others` have no effect."""

    option: str
    others: tuple[str, ...]


class Restricts(msgspec.Struct, frozen=True):
    """With `option`, nothing but `kept` has an effect."""

    option: str
    kept: tuple[str, ...]


class Fixed(msgspec.Struct, frozen=True):
    """The command sets `options` itself; `reason` completes "--x has no effect: "."""

    options: tuple[str, ...]
    reason: str


Rule = Needs | Displaces | Restricts | Fixed
ENGINE = tuple(name for name in Settings.__struct_fields__ if name != "model")
LOAD = BenchOptions.__struct_fields__
_ENGINE_WITHOUT_SEED = tuple(name for name in ENGINE if name != "seed")
_LOAD_RULES: tuple[Rule, ...] = (
    Needs("prefix_len", ("input_len", "output_len")),
    Displaces("input_len", ("workload",)),
    Displaces("output_len", ("workload",)),
)
WAYS_TO_APPLY = ("restart_cmd", "apply_cmd", "docker", "kubernetes", "slurm", "ray")
_JUDGED = ("html", "json", "accelerator", "model", "seed", "slo", "config")

RULES: Mapping[str, tuple[Rule, ...]] = {
    "bench": (
        *_LOAD_RULES,
        Needs("burstiness", ("request_rate", "sweep", "find_goodput")),
        Needs("served_model_name", ("url",)),
        Needs("endpoint", ("url",)),
        Needs("accelerator", ("url",)),
        Needs("stream", ("url",)),
        Displaces("url", _ENGINE_WITHOUT_SEED),
        Displaces("num_runs", ("sweep", "find_goodput", "layout")),
        Displaces("sweep", ("find_goodput", "layout", "request_rate")),
        Displaces("find_goodput", ("layout", "request_rate")),
        Displaces("served_model_name", ("named_model",)),
    ),
    "diagnose": (
        Restricts("nsight", ("json", "config")),
        Restricts("run", (*_JUDGED, "baseline")),
        Restricts("url", (*_JUDGED, *LOAD, "served_model_name", "api_key")),
        Restricts(
            "profile",
            (
                *(*ENGINE, "workload", "max_concurrency", "input_len", "output_len"),
                *("model", "html", "json", "config"),
            ),
        ),
        Fixed(("stream",), "latency is diagnosed token by token"),
        *_LOAD_RULES,
        Needs("burstiness", ("request_rate",)),
        Needs("served_model_name", ("url",)),
        Needs("accelerator", ("url", "run")),
    ),
    "optimize": (
        Needs("url", (*WAYS_TO_APPLY, "advise")),
        *(Needs(way, ("url",)) for way in WAYS_TO_APPLY),
        Needs("server_cmd", ("apply_cmd", "advise")),
        Needs("ready_url", ("apply_cmd", "docker", "kubernetes", "ray")),
        Needs("dry_run", ("url",)),
        Needs("rbac", ("kubernetes",)),
        Needs("advise", ("url",)),
        Needs("accelerator", ("url",)),
        Displaces(
            "advise",
            ("dry_run", "rbac", "output", "ready_url", "start_timeout", "compile_cache"),
        ),
        Displaces("rbac", ("dry_run",)),
        Needs("server", ("url",)),
        Needs("served_model_name", ("url",)),
        Needs("api_key", ("url",)),
        Needs("start_timeout", ("url",)),
        Needs("compile_cache", ("restart_cmd", "docker", "kubernetes", "slurm")),
        Needs("eval_cmd", ("url",)),
        Needs("eval_margin", ("eval_cmd",)),
        Needs("candidate_model", ("url",)),
        Needs("candidate_drafter", ("url",)),
        Needs("candidate_cmd", ("restart_cmd",)),
        Displaces("advise", ("eval_cmd", "eval_margin")),
    ),
    "chat": (
        Needs("served_model_name", ("url",)),
        Needs("api_key", ("url",)),
        Displaces("url", ("model", *ENGINE)),
    ),
    "top": (Needs("json", ("once",)),),
    "models": (Needs("calibration", ("fit",)),),
    "watch": (Needs("image", ("cronjob",)), Needs("schedule", ("cronjob",))),
    "eval": (
        Needs("server", ("url",)),
        Needs("served_model_name", ("url",)),
        Needs("api_key", ("url",)),
        Needs("eval_cmd", ("url",)),
        Needs("eval_margin", ("eval_cmd",)),
        Restricts(
            "url",
            (
                *("server", "served_model_name", "api_key", "eval_cmd", "eval_margin"),
                *("budget", "json", "config"),
            ),
        ),
        Needs("lm_eval_path", ("lm_eval",)),
        Needs("lm_eval_limit", ("lm_eval",)),
        Needs("lm_eval_program", ("lm_eval",)),
    ),
    "calibrate": (
        Displaces("url", ("quantization", "also", "device")),
        Needs("served_model_name", ("url",)),
    ),
    "predict": (
        Needs("max_lora_rank", ("max_loras",)),
        Displaces(
            "input",
            (
                *("model", "accelerator", "input_len", "output_len", "max_concurrency"),
                *("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"),
                *("moe_tensor_parallel_size", "attention_dp_size", "context_parallel_size"),
                "sequence_parallel",
                "backend",
                *("quantization", "kv_cache_dtype", "cached_tokens", "max_num_batched_tokens"),
                *("num_speculative_tokens", "acceptance", "draft_model", "kv_eviction_config"),
                *("max_loras", "max_lora_rank", "what_if", "thinking_len", "beam_width"),
                *("thinking_token_budget", "quantization_method", "embedding_bits"),
                *("speculative_config", "draft_share"),
            ),
        ),
        Needs("output", ("input",)),
        Needs("thinking_len", ("thinking_token_budget",)),
        Needs("thinking_token_budget", ("thinking_len",)),
        Needs("quantization_method", ("quantization",)),
        Needs("draft_share", ("num_speculative_tokens", "speculative_config")),
        Displaces("speculative_config", ("num_speculative_tokens", "draft_model")),
    ),
    "inspect": (
        Displaces("what_if", ("against", "layout")),
        Displaces("layout", ("against",)),
    ),
    "plan": (
        Needs("max_lora_rank", ("max_loras",)),
        Displaces("workload", ("input_len", "output_len")),
        Displaces(
            "from_traffic",
            (
                *("workload", "input_len", "output_len", "request_rate", "cached_share"),
                *("dropped_context_share", "document_len", "keep_ratio", "new_document_share"),
            ),
        ),
        Needs("document_len", ("keep_ratio",)),
        Needs("keep_ratio", ("document_len",)),
        Needs("new_document_share", ("keep_ratio",)),
        Needs("traffic_duration", ("from_traffic",)),
        Needs("api_key", ("from_traffic",)),
        Displaces("node_label", ("cluster",)),
        Needs("cluster", ("manifests",)),
        Needs("node_label", ("manifests",)),
        Needs("image", ("manifests",)),
        Needs("ray_image", ("manifests",)),
    ),
    "simulate": (
        Needs("max_lora_rank", ("max_loras",)),
        Needs("repair_s", ("mtbf_s",)),
        Needs("target_in_flight", ("autoscale",)),
        Needs("startup_s", ("autoscale",)),
        Needs("acceptance", ("num_speculative_tokens", "speculative_config")),
        Needs("draft_share", ("num_speculative_tokens", "speculative_config")),
        Displaces("speculative_config", ("num_speculative_tokens",)),
        Needs("num_workers", ("sweep",)),
        Displaces("workload", ("input_len", "output_len")),
        Displaces("replay_speed", ("request_rate",)),
    ),
    "cost": (
        Needs("hit_rate", ("prefix_len",)),
        Needs("num_prefixes", ("prefix_len",)),
        Needs("long_lived", ("prefix_len",)),
        Needs("spot_interruptions", ("spot_price",)),
        Needs("spot_lost_s", ("spot_price",)),
        Needs("owned_years", ("owned_dollars",)),
        Needs("watts", ("owned_dollars",)),
        Needs("dollars_per_kwh", ("owned_dollars",)),
        Needs("pue", ("owned_dollars",)),
        Displaces("workload", ("input_len", "output_len")),
    ),
    "serve": (
        Needs("speed", ("twin",)),
        Needs("acceptance", ("twin",)),
        Needs("batch_window", ("batch_store",)),
        Needs("response_cache_ttl", ("response_cache_size",)),
        Needs("semantic_cache_pairs", ("response_cache_size",)),
        Needs("semantic_cache_max_false_hits", ("semantic_cache_pairs",)),
        Displaces("twin", ("semantic_cache_pairs",)),
        Needs("batch_store_max_bytes", ("batch_store",)),
        Needs("allow_runtime_lora_updating", ("enable_lora",)),
        Needs("max_loras", ("enable_lora",)),
        Needs("max_lora_rank", ("enable_lora",)),
    ),
    "route": (
        *(Needs(name, ("canary",)) for name in CanaryOptions.__struct_fields__ if name != "canary"),
        *(
            Needs(name, ("fallback_url",))
            for name in FallbackOptions.__struct_fields__
            if name != "fallback_url"
        ),
    ),
}
"""By command."""


def refuse(flags: Sequence[str], when: str) -> None:
    """BadInput for the first of `flags`: "--x has no effect {when}"."""
    for flag in flags:
        raise BadInput(f"{flag} has no effect {when}", fix=f"leave {flag} out")


def unused(
    rule: Rule, typed: frozenset[str], given: frozenset[str] = frozenset()
) -> Iterator[tuple[str, str, str]]:
    """(option without an effect, "with" or "without", the other option or the reason), of `typed`.

    The second is "" where the third is a reason. `given`: options that a file or an environment
    variable sets, which others may need.
    """
    if isinstance(rule, Fixed):
        yield from ((name, "", rule.reason) for name in rule.options if name in typed)
    elif rule.option not in typed:
        return
    elif isinstance(rule, Needs):
        if not (typed | given) & {*rule.others}:
            yield rule.option, "without", rule.others[0]
    elif isinstance(rule, Displaces):
        yield from ((name, "with", rule.option) for name in rule.others if name in typed)
    else:
        others = (name for name in typed if name not in (*rule.kept, rule.option))
        yield from ((name, "with", rule.option) for name in sorted(others))
