"""Options of the server: the `[server]` table of `ridgeline.toml`, flags of `ridgeline serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from ridgeline.config import shared
from ridgeline.config.option import About, Section
from ridgeline.config.units import (
    BYTES,
    COUNT,
    DOLLARS,
    DURATION,
    NON_NEGATIVE_COUNT,
    NON_NEGATIVE_SECONDS,
    NUMBER,
    PORT,
    SHARE,
    TOKENS,
    Range,
)
from ridgeline.errors import BadInput
from ridgeline.records import Slo
from ridgeline.records.thinking import ReasoningConfig

ToolFormat = Literal["hermes", "llama3_json", "qwen3_xml", "openai"]
RoutingPolicy = Literal[
    "round-robin", "least-loaded", "power-of-two", "prefix-aware", "session", "ttft"
]
ReasoningFormat = Literal["think", "think_open", "openai_gptoss"]
SPEED = About(
    "Modelled seconds per second of real time.",
    unit=NUMBER,
    range=Range(0, 1e4, exclusive=True),
    since="0.3",
)
_OTLP_ENDPOINT = About(
    "Send OpenTelemetry traces and metrics to this collector, by OTLP over HTTP.",
    metavar="URL",
    unset="none",
    env="OTEL_EXPORTER_OTLP_ENDPOINT",
    since="0.3",
)
_HOST = About(
    "Address to listen on. Anything but loopback needs an API key or --insecure.",
    metavar="ADDRESS",
)
_TIMEOUT = About("", unit=DURATION, range=NON_NEGATIVE_SECONDS, flag="")


class ServeModel(Section, frozen=True, kw_only=True):
    """The model that `ridgeline serve` opens."""

    model: Annotated[str | None, shared.OPTIONAL_MODEL] = None


class ServerOptions(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the HTTP server. Times are seconds, sizes bytes; None switches a limit off."""

    title: ClassVar[str] = "Server"
    table: ClassVar[str] = "server"

    host: Annotated[str, _HOST] = "127.0.0.1"
    port: Annotated[int, About("Port to listen on; 0 takes a free one.", unit=PORT)] = 8000
    served_model_name: Annotated[
        str | None,
        About("Model name that clients use.", metavar="NAME", unset="the name of MODEL"),
    ] = None
    further_models: Annotated[
        tuple[str, ...],
        About(
            "Further model to serve, chosen by the requests that name it (repeatable).",
            flag="model",
            metavar="MODEL",
            since="0.3",
        ),
    ] = ()
    admin_port: Annotated[
        int | None,
        About("Loopback port for metrics, state, aborting and draining.", unit=PORT, unset="none"),
    ] = None
    shutdown_timeout_s: Annotated[
        int,
        About(
            "Maximum wait for running requests after SIGTERM.",
            unit=DURATION,
            range=NON_NEGATIVE_SECONDS,
        ),
    ] = 30
    log_requests: Annotated[bool, About("Log a line per request, without its content.")] = False
    otlp_endpoint: Annotated[str | None, _OTLP_ENDPOINT] = None
    emf_file: Annotated[
        str | None,
        About(
            "Append CloudWatch metrics to this file, a line per minute; - writes to stdout.",
            metavar="FILE",
            unset="none",
            since="0.3",
        ),
    ] = None
    enable_per_request_metrics: Annotated[
        bool, About("Return timings with the usage where a request sets include_metrics.")
    ] = False
    stream_interval: Annotated[
        int, About("Tokens per streamed chunk; the first is sent at once.", unit=TOKENS)
    ] = 1
    enable_auto_tool_choice: Annotated[
        bool, About("Let the model decide to call tools (tool_choice: auto).")
    ] = False
    tool_call_parser: Annotated[
        ToolFormat | None, About("Format in which this model writes tool calls.")
    ] = None
    reasoning_parser: Annotated[
        ReasoningFormat | None,
        About(
            "How this model marks its reasoning: think (<think> tags), think_open (a closing tag "
            "only), openai_gptoss (harmony channels).",
        ),
    ] = None
    allow_runtime_lora_updating: Annotated[
        bool,
        About(
            "Let administrators' keys load and unload adapters from this machine's directories "
            "over HTTP.",
            env="VLLM_ALLOW_RUNTIME_LORA_UPDATING",
            since="0.3",
        ),
    ] = False
    reasoning_config: Annotated[
        ReasoningConfig | None,
        About(
            "Marks of the model's thinking for thinking budgets, as vLLM's JSON with "
            "reasoning_start_str and reasoning_end_str; text before the end mark is added when a "
            "budget is spent.",
            unset="those of --reasoning-parser",
            since="0.3",
        ),
    ] = None
    api_key: Annotated[
        str | None,
        About(
            "Key that clients must send.",
            panel="Access and limits",
            metavar="KEY",
            env="RIDGELINE_API_KEY",
        ),
    ] = None
    api_keys_file: Annotated[
        str | None,
        About("TOML file of hashed keys with their names and limits.", metavar="FILE"),
    ] = None
    insecure: Annotated[bool, About("Serve non-local clients without a key, at your own risk.")] = (
        False
    )
    allowed_hosts: Annotated[
        str,
        About("Accepted Host headers, separated by commas; * for any.", metavar="HOSTS"),
    ] = ""
    allowed_origins: Annotated[
        str,
        About("Web origins that may call this server, separated by commas.", metavar="ORIGINS"),
    ] = ""
    max_body_bytes: Annotated[int, About("Maximum size of a request body.", unit=BYTES)] = 4 << 20
    max_num_connections: Annotated[
        int, About("Maximum connections, and maximum requests in progress.", unit=COUNT)
    ] = 4096
    requests_per_minute: Annotated[
        int | None, About("Rate limit of each key, in requests.", unit=COUNT, unset="none")
    ] = None
    tokens_per_minute: Annotated[
        int | None,
        About("Rate limit of each key, in prompt and output tokens.", unit=TOKENS, unset="none"),
    ] = None
    header_timeout_s: Annotated[
        float, _TIMEOUT.but(help="Maximum time for a client to send its headers.")
    ] = 15.0
    body_timeout_s: Annotated[
        float, _TIMEOUT.but(help="Maximum time for a client to send its body.")
    ] = 30.0
    send_timeout_s: Annotated[
        float, _TIMEOUT.but(help="Maximum time for a client to accept data.")
    ] = 30.0
    keep_alive_s: Annotated[
        int, _TIMEOUT.but(help="Time after which idle connections are closed.")
    ] = 15
    slo_classes: Annotated[
        str,
        About(
            "SLOs by request class: 'chat=ttft:500 tpot:50;bulk=e2e:60000'.",
            panel="SLO and cost",
            metavar="CLASSES",
        ),
    ] = ""
    default_slo_class: Annotated[
        str | None,
        About("Class of requests that name none.", metavar="CLASS", unset="the first"),
    ] = None
    price_per_hour: Annotated[float | None, shared.PRICE_PER_HOUR] = None
    warm_prompts: Annotated[
        str | None,
        About(
            "File of prompts to compute and pin before serving: a body of /v1/cache/warm per line.",
            panel="Caching",
            metavar="FILE",
            unset="none",
        ),
    ] = None
    response_cache_size: Annotated[
        int | None,
        About(
            "Memory for answers that are given again to the same greedy or seeded request.",
            unit=BYTES,
            unset="off",
        ),
    ] = None
    response_cache_ttl: Annotated[
        float,
        About("Time for which such an answer is kept.", unit=DURATION, range=NON_NEGATIVE_SECONDS),
    ] = 3600.0
    semantic_cache_pairs: Annotated[str | None, shared.QUESTION_PAIRS] = None
    semantic_cache_max_false_hits: Annotated[float, shared.MAX_FALSE_HITS] = 0.05
    batch_store: Annotated[
        str | None,
        About(
            "SQLite file of the Batch API.",
            panel="Batch API",
            metavar="FILE",
            unset="no Batch API",
        ),
    ] = None
    batch_store_max_bytes: Annotated[
        int | None,
        About(
            "Maximum size of that file; when full, uploads are rejected with 413.",
            unit=BYTES,
            unset="16 GiB",
        ),
    ] = None
    batch_window: Annotated[
        str | None,
        About(
            "Hours in which batch requests are started: 22:00-06:00.",
            metavar="HOURS",
            unset="always",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.parsed_slo_classes
        if self.default_slo_class is not None and self.default_slo_class not in known:
            raise BadInput(
                "--default-slo-class must be one of --slo-classes",
                value=self.default_slo_class,
                limit=", ".join(known) or "no classes are defined",
            )
        if self.further_models and self.batch_store is not None:
            raise BadInput(
                "--batch-store cannot be combined with --model: batches run on one model",
                fix="serve the model of the batches alone",
            )
        if self.reasoning_config is not None and self.reasoning_parser is None:
            raise BadInput(
                "--reasoning-config needs --reasoning-parser",
                fix="name the format in which this model marks its reasoning",
            )
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise BadInput(
                "--enable-auto-tool-choice needs --tool-call-parser",
                fix="name the format in which this model writes tool calls",
            )

    @property
    def parsed_slo_classes(self) -> dict[str, Slo]:
        """SLOs by the name of their class."""
        return parse_slo_classes(self.slo_classes)

    @property
    def default_slo(self) -> Slo | None:
        """The SLO of requests that name no class: the default class's, else the first one's."""
        classes = self.parsed_slo_classes
        return classes[self.default_slo_class or next(iter(classes))] if classes else None


def _routes(text: str, **facts: Any) -> About:
    return About(text, since="0.3", **facts)


def _waits(text: str) -> About:
    return _routes(text, unit=DURATION, range=NON_NEGATIVE_SECONDS)


class RouteOptions(Section, frozen=True, kw_only=True):
    """A gateway in front of several servers."""

    title: ClassVar[str] = "Gateway"
    table: ClassVar[str] = "route"
    prefix: ClassVar[str] = "route_"

    backend: Annotated[
        tuple[str, ...],
        _routes(
            "URL of a server to route to, such as http://10.0.0.7:8000 (repeatable).", metavar="URL"
        ),
    ] = ()
    decode_backend: Annotated[
        tuple[str, ...],
        _routes("Server that decodes, Ridgeline's or vLLM's (repeatable).", metavar="URL"),
    ] = ()
    prefill_backend: Annotated[
        tuple[str, ...], _routes("Server that computes their prompts (repeatable).", metavar="URL")
    ] = ()
    prefill_min_tokens: Annotated[
        int, _routes("Shortest prompt, by estimate, for them.", unit=TOKENS)
    ] = 64
    backend_file: Annotated[
        Path | None,
        _routes(
            "File of further URLs, one per line, which is read again when it changes.",
            path="input",
            unset="none",
        ),
    ] = None
    backend_dns: Annotated[
        tuple[str, ...],
        _routes(
            "URL whose name has one address per server, as that of a headless Service; looked up "
            "every 5 s (repeatable).",
            metavar="URL",
        ),
    ] = ()
    policy: Annotated[RoutingPolicy, _routes("How a backend is chosen for a request.")] = "ttft"
    host: Annotated[str, _HOST.but(since="0.3")] = "127.0.0.1"
    port: Annotated[int, _routes("Port to listen on; 0 takes a free one.", unit=PORT)] = 8080
    api_key: Annotated[
        str | None,
        _routes(
            "Key that clients must send; backends get it too.",
            metavar="KEY",
            env="RIDGELINE_API_KEY",
        ),
    ] = None
    insecure: Annotated[
        bool, _routes("Serve non-local clients without a key, at your own risk.")
    ] = False
    allowed_hosts: Annotated[
        str, _routes("Accepted Host headers, separated by commas; * for any.", metavar="HOSTS")
    ] = ""
    close_on_stop: Annotated[
        bool, _routes("On SIGTERM, free the port at once while streams end.")
    ] = False
    slo_classes: Annotated[
        str,
        _routes(
            "SLOs by request class, for --policy ttft: 'chat=ttft:500;bulk=e2e:60000'.",
            metavar="CLASSES",
        ),
    ] = ""
    park_timeout_s: Annotated[
        float, _waits("Maximum wait of a request for a backend that is ready.")
    ] = 30.0
    max_num_parked: Annotated[
        int, _routes("Maximum requests that wait for a backend.", unit=COUNT)
    ] = 1024
    silence_s: Annotated[
        float,
        _routes(
            "Time without a byte from a backend, though asked, after which others come first.",
            unit=DURATION,
            range=Range(0, 3600, exclusive=True),
        ),
    ] = 5.0
    stream_silence_s: Annotated[
        float,
        _routes(
            "Time without a byte of a stream that has begun, after which another backend "
            "continues it.",
            unit=DURATION,
            range=Range(0, 86_400, exclusive=True),
        ),
    ] = 60.0
    target_in_flight: Annotated[
        float,
        _routes(
            "Requests that one backend serves within its SLO, for ridgeline_wanted_replicas.",
            unit=NUMBER,
            range=Range(1e-3, 1e6),
        ),
    ] = 16.0
    otlp_endpoint: Annotated[str | None, _OTLP_ENDPOINT] = None
    retry_share: Annotated[
        float,
        _routes(
            "Maximum share of requests that are sent again after an error.",
            unit=NUMBER,
            range=Range(0, 1),
        ),
    ] = 0.1
    shutdown_timeout_s: Annotated[
        int, _waits("Maximum wait for running requests after SIGTERM.")
    ] = 30

    @property
    def parsed_slo_classes(self) -> dict[str, Slo]:
        """SLOs by the name of their class."""
        return parse_slo_classes(self.slo_classes)


class CanaryOptions(Section, frozen=True, kw_only=True):
    """A new version behind the gateway, and when it is promoted or rolled back."""

    title: ClassVar[str] = "Canary"
    table: ClassVar[str] = "canary"

    canary: Annotated[
        tuple[str, ...],
        About("URL of a server with the new version (repeatable).", metavar="URL", since="0.3"),
    ] = ()
    canary_shadow_share: Annotated[
        float,
        About(
            "Share of the requests whose copy the new version answers, unseen, for comparison.",
            unit=SHARE,
            since="0.3",
        ),
    ] = 0.1
    canary_stages: Annotated[
        str,
        About("Its shares of the sessions, one after another.", metavar="SHARES", since="0.3"),
    ] = "0.05,0.25,0.5"
    canary_min_tokens: Annotated[
        int,
        About(
            "Compared tokens before it gets traffic; 0 begins with traffic.",
            unit=TOKENS,
            range=NON_NEGATIVE_COUNT,
            since="0.3",
        ),
    ] = 50_000
    canary_min_sessions: Annotated[
        int,
        About("Its sessions before the next stage.", unit=COUNT, since="0.3"),
    ] = 300
    canary_alpha: Annotated[
        float,
        About(
            "Probability of rolling back a version that is no worse.",
            unit=NUMBER,
            range=Range(1e-6, 0.5),
            since="0.3",
        ),
    ] = 0.05
    canary_max_disagreement: Annotated[
        float,
        About(
            "Differing tokens that are allowed, per token; 0: none, for an exact change.",
            unit=SHARE,
            since="0.3",
        ),
    ] = 0.0
    canary_max_slowdown: Annotated[
        float,
        About(
            "Slowdown that is allowed: 0.02 for 2 %.", unit=NUMBER, range=Range(0, 10), since="0.3"
        ),
    ] = 0.02
    canary_state: Annotated[
        Path | None,
        About(
            "File that keeps the state over restarts; delete it for the next version.",
            path="file",
            unset="none",
            since="0.3",
        ),
    ] = None

    @property
    def shares(self) -> tuple[float, ...]:
        """The stages as numbers. Raises BadInput."""
        try:
            return tuple(float(share) for share in self.canary_stages.split(","))
        except ValueError:
            raise BadInput(
                "--canary-stages must be shares between 0 and 1",
                value=self.canary_stages,
                fix="write 0.05,0.25,0.5",
            ) from None


class FallbackOptions(Section, frozen=True, kw_only=True):
    """A managed API that gets requests which no backend can answer."""

    title: ClassVar[str] = "Fallback"
    table: ClassVar[str] = "fallback"

    fallback_url: Annotated[
        str | None,
        About(
            "Base URL of an API like OpenAI's, without /v1.",
            metavar="URL",
            unset="none",
            since="0.3",
        ),
    ] = None
    fallback_api_key: Annotated[
        str | None,
        About("Key of the API, in place of the client's.", metavar="KEY", since="0.3"),
    ] = None
    fallback_model: Annotated[
        str | None,
        About("Name of the model there.", metavar="NAME", unset="the client's", since="0.3"),
    ] = None
    fallback_input_price: Annotated[
        float,
        About("Dollars per million prompt tokens.", unit=DOLLARS, since="0.3"),
    ] = 0.0
    fallback_output_price: Annotated[
        float,
        About("Dollars per million output tokens.", unit=DOLLARS, since="0.3"),
    ] = 0.0
    fallback_dollars_per_hour: Annotated[
        float,
        About("The most that this gateway may spend on it in an hour.", unit=DOLLARS, since="0.3"),
    ] = 0.0
    fallback_after_s: Annotated[
        float,
        About("Wait for a backend before.", unit=DURATION, range=NON_NEGATIVE_SECONDS, since="0.3"),
    ] = 1.0


class TwinServerOptions(Section, frozen=True, kw_only=True):
    """Another inference server to simulate. `command`: its program and flags, as one line."""

    title: ClassVar[str] = "Twin"
    table: ClassVar[str] = "twin"
    prefix: ClassVar[str] = "twin_"

    command: Annotated[
        str,
        About(
            "The server's command line: vllm serve MODEL, sglang serve, trtllm-serve, "
            "text-generation-launcher or llama-server, with its own flags.",
            positional=True,
            required=True,
            metavar="COMMAND",
        ),
    ]
    device: Annotated[
        str,
        About(
            "Accelerators of the simulated server, by their name in the catalogue.",
            metavar="NAME[:COUNT]",
            since="0.3",
        ),
    ] = "h100-sxm:8"
    speed: Annotated[float, SPEED] = 1.0
    acceptance: Annotated[float, shared.LOOKUP_ACCEPTANCE] = 0.6
    drafter_acceptance: Annotated[float, shared.DRAFTER_ACCEPTANCE] = 0.75
    chat_only: Annotated[
        bool,
        About(
            "Only answer chats, as many gateways do: no /v1/completions and no prompt scores.",
            since="0.3",
        ),
    ] = False
    ignore_unknown_flags: Annotated[
        bool, About("Ignore flags that the known version of the server lacks.", since="0.3")
    ] = False


class TwinOptions(Section, frozen=True, kw_only=True):
    """Serve on a simulated device, without the weights."""

    title: ClassVar[str] = "Twin"

    twin: Annotated[
        bool,
        About(
            "Simulate the accelerators --device NAME[:COUNT] of the catalogue: steps take the "
            "predicted time, and answers are synthetic.",
            since="0.3",
        ),
    ] = False
    speed: Annotated[float, SPEED] = 1.0
    acceptance: Annotated[float, shared.ACCEPTANCE.but(since="0.3")] = 0.6


def parse_slo_classes(text: str) -> dict[str, Slo]:
    """SLOs by name, in order, of `chat=ttft:500 tpot:50;bulk=e2e:60000`. Raises BadInput."""
    classes: dict[str, Slo] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, slo = part.partition("=")
        if not equals or not name.strip().isidentifier() or name.strip() in classes:
            fix = "write e.g. 'chat=ttft:500 tpot:50;bulk=e2e:60000' (milliseconds)"
            raise BadInput("--slo-classes cannot be read", value=part, fix=fix)
        classes[name.strip()] = Slo.parse(slo)
    return classes
