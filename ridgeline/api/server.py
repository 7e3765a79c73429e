"""Serve a model over HTTP from this process."""

from __future__ import annotations

from typing import Unpack

from ridgeline.api.keywords import check_effective, download_models, engine_settings, options_from
from ridgeline.config.server import (
    ReasoningFormat,
    ServerOptions,
    ToolFormat,
    TwinOptions,
)
from ridgeline.config.settings import EngineSettings
from ridgeline.records.progress import Observer, silent
from ridgeline.records.thinking import ReasoningConfig
from ridgeline.workflows.serving.local_server import LocalServer


def serve(
    model: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str | None = None,
    further_models: tuple[str, ...] = (),
    admin_port: int | None = None,
    shutdown_timeout_s: int | str = 30,
    log_requests: bool = False,
    enable_per_request_metrics: bool = False,
    stream_interval: int = 1,
    enable_auto_tool_choice: bool = False,
    tool_call_parser: ToolFormat | None = None,
    reasoning_parser: ReasoningFormat | None = None,
    allow_runtime_lora_updating: bool = False,
    reasoning_config: ReasoningConfig | None = None,
    api_key: str | None = None,
    api_keys_file: str | None = None,
    insecure: bool = False,
    allowed_hosts: str = "",
    allowed_origins: str = "",
    max_body_bytes: int = 4194304,
    max_num_connections: int = 4096,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    header_timeout_s: float | str = 15.0,
    body_timeout_s: float | str = 30.0,
    send_timeout_s: float | str = 30.0,
    keep_alive_s: int | str = 15,
    slo_classes: str = "",
    default_slo_class: str | None = None,
    price_per_hour: float | None = None,
    batch_store: str | None = None,
    batch_store_max_bytes: int | None = None,
    batch_window: str | None = None,
    response_cache_size: int | str | None = None,
    response_cache_ttl: float | str = 3600.0,
    semantic_cache_pairs: str | None = None,
    semantic_cache_max_false_hits: float | str = 0.05,
    warm_prompts: str | None = None,
    otlp_endpoint: str | None = None,
    emf_file: str | None = None,
    twin: bool = False,
    speed: float = 1.0,
    acceptance: float = 0.6,
    observer: Observer = silent,
    **settings: Unpack[EngineSettings],
) -> LocalServer:
    """Serve a model over the OpenAI and Anthropic APIs, in a thread of this process.

    >>> import httpx, ridgeline
    >>> with ridgeline.serve("demo", port=0) as server:
    ...     models = httpx.get(f"{server.url}/v1/models").json()
    >>> models["data"][0]["id"]
    'demo'

    Args:
        model: Name of a model: a directory, a .gguf file or its address,
            OWNER/REPO[@REVISION][:QUANTISATION] on the Hugging Face Hub, 'smollm2', 'demo', or
            'dummy:SHAPE' (random weights) (default: smollm2).
        host: Address to listen on. Anything but loopback needs an API key or --insecure.
        port: Port to listen on; 0 takes a free one.
        served_model_name: Model name that clients use (default: the name of MODEL).
        further_models: Further model to serve, chosen by the requests that name it (repeatable).
        admin_port: Loopback port for metrics, state, aborting and draining (default: none).
        shutdown_timeout_s: Maximum wait for running requests after SIGTERM.
        log_requests: Log a line per request, without its content.
        enable_per_request_metrics: Return timings with the usage where a request sets
            include_metrics.
        stream_interval: Tokens per streamed chunk; the first is sent at once.
        enable_auto_tool_choice: Let the model decide to call tools (tool_choice: auto).
        tool_call_parser: Format in which this model writes tool calls.
        reasoning_parser: How this model marks its reasoning: think (<think> tags), think_open
            (a closing tag only), openai_gptoss (harmony channels).
        allow_runtime_lora_updating: Let administrators' keys load and unload adapters from this
            machine's directories over HTTP.
        reasoning_config: Marks of the model's thinking for thinking budgets, as vLLM's JSON with
            reasoning_start_str and reasoning_end_str; text before the end mark is added when a
            budget is spent (default: those of --reasoning-parser).
        api_key: Key that clients must send.
        api_keys_file: TOML file of hashed keys with their names and limits.
        insecure: Serve non-local clients without a key, at your own risk.
        allowed_hosts: Accepted Host headers, separated by commas; * for any.
        allowed_origins: Web origins that may call this server, separated by commas.
        max_body_bytes: Maximum size of a request body.
        max_num_connections: Maximum connections, and maximum requests in progress.
        requests_per_minute: Rate limit of each key, in requests (default: none).
        tokens_per_minute: Rate limit of each key, in prompt and output tokens (default:
            none).
        header_timeout_s: Maximum time for a client to send its headers.
        body_timeout_s: Maximum time for a client to send its body.
        send_timeout_s: Maximum time for a client to accept data.
        keep_alive_s: Time after which idle connections are closed.
        slo_classes: SLOs by request class: 'chat=ttft:500 tpot:50;bulk=e2e:60000'.
        default_slo_class: Class of requests that name none (default: the first).
        price_per_hour: Price of this machine per hour.
        batch_store: SQLite file of the Batch API (default: no Batch API).
        batch_store_max_bytes: Maximum size of that file; when full, uploads are rejected
            with 413 (default: 16 GiB).
        batch_window: Hours in which batch requests are started: 22:00-06:00 (default:
            always).
        response_cache_size: Memory for answers that are given again to the same greedy or seeded
            request (default: off).
        response_cache_ttl: Time for which such an answer is kept.
        semantic_cache_pairs: JSONL file of equal and different questions: calibrates by how similar
            the last user message must be to get a stored answer to another one. Lossy (default:
            equal requests only).
        semantic_cache_max_false_hits: Limit of the false-hit rate on the different pairs, with 95 %
            confidence.
        warm_prompts: File of prompts to compute and pin before serving: a body of /v1/cache/warm
            per line (default: none).
        otlp_endpoint: Send OpenTelemetry traces and metrics to this collector, by OTLP over HTTP
            (default: none).
        emf_file: Append CloudWatch metrics to this file, a line per minute; - writes to stdout
            (default: none).
        twin: Simulate the accelerators --device NAME[:COUNT] of the catalogue: steps take the
            predicted time, and answers are synthetic.
        speed: Modelled seconds per second of real time.
        acceptance: Speculative decoding: probability that a draft token is accepted.
        observer: Called with every progress event; `print` shows them as lines.
        settings: Engine settings.

    Returns:
        The server, which accepts requests. Leaving its `with` block, or `close`, stops it; a script
        that only serves calls `wait`.

    Raises:
        UserError: An option is wrong, or what it describes cannot run.
    """
    keywords = locals()
    check_effective("serve", keywords)
    options = options_from(ServerOptions, keywords)
    own_settings = engine_settings(model, settings)
    if twin:
        return LocalServer(own_settings, options, observer, options_from(TwinOptions, keywords))
    return LocalServer(download_models(own_settings, observer), options, observer)
