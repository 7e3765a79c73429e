"""The `[server]` table of a `ridgeline.toml`, and the flags of the same names.

`HELP` has the lines of `ridgeline serve --help`; a field without one can only be set in the file.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, Literal

import msgspec

from ridgeline.errors import BadInput
from ridgeline.records import Slo

ToolFormat = Literal["hermes", "llama3_json", "qwen3_xml"]
ReasoningFormat = Literal["think", "think_open"]

HELP = {
    "host": "Address to listen on. Any but loopback needs an API key or --insecure.",
    "port": "Port to listen on; 0 takes any free one.",
    "served_model_name": "Model name in the API (default: the model's own).",
    "api_key": "API key that clients must send.",
    "api_keys_file": "TOML file of hashed API keys, each with a name and limits.",
    "insecure": "Serve other machines without an API key.",
    "allowed_hosts": "Host names that requests may be addressed to, separated by commas.",
    "allowed_origins": "Web origins whose pages may call this server, separated by commas.",
    "admin_port": "Loopback port for metrics, state, aborting and draining (default: none).",
    "shutdown_timeout_s": "Seconds that running requests may take after SIGTERM.",
    "log_requests": "Log one line per request, without its content.",
    "enable_per_request_metrics": "Honour include_metrics: send timings with the usage.",
    "max_body_bytes": "Largest request body.",
    "max_num_connections": "Maximum number of connections, and of requests in progress.",
    "stream_interval": "Tokens per chunk of a stream; the first one is sent at once.",
    "requests_per_minute": "Requests per minute and API key.",
    "tokens_per_minute": "Prompt and output tokens per minute and API key.",
    "slo_classes": "SLOs by class, e.g. 'chat=ttft:500 tpot:50;bulk=e2e:60000'.",
    "batch_store": "SQLite file of the Batch API (default: no Batch API).",
    "batch_store_max_bytes": "Size limit of that file (default: 16 GiB); a full one refuses uploads.",
    "batch_window": "Hours in which batch requests are started, e.g. 22:00-06:00.",
    "price_per_hour": "Price of this machine per hour, for the cost metrics.",
    "default_slo_class": "Class of requests that name none (default: the first).",
    "enable_auto_tool_choice": "Let the model decide to call tools (tool_choice: auto).",
    "tool_call_parser": "How the model writes tool calls: hermes, llama3_json or qwen3_xml.",
    "reasoning_parser": "How the model marks reasoning: think, or think_open if the prompt opens it.",
}


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on a request, checked before any work is done for it."""

    max_n: int = 64
    max_prompts: int = 256
    max_choices: int = 1024
    max_stop: int = 16
    max_stop_chars: int = 256
    max_logit_bias: int = 300
    max_token_ids: int = 4096
    max_messages: int = 2048
    max_tools: int = 128
    max_grammar_bytes: int = 64 << 10
    max_prompt_tokens: int = 4 << 20
    max_inputs: int = 256


LIMITS = RequestLimits()


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the server. Times are in seconds, sizes in bytes; None disables a limit."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = None
    api_keys_file: str | None = None
    insecure: bool = False
    allowed_hosts: str = ""
    allowed_origins: str = ""
    admin_port: int | None = None
    shutdown_timeout_s: int = 30
    log_requests: bool = False
    enable_per_request_metrics: bool = False
    max_body_bytes: int = 4 << 20
    max_num_connections: int = 4096
    header_timeout_s: float = 15.0
    body_timeout_s: float = 30.0
    send_timeout_s: float = 30.0
    keep_alive_s: int = 15
    stream_interval: int = 1
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    batch_store: str | None = None
    batch_store_max_bytes: int | None = None
    batch_window: str | None = None
    price_per_hour: float | None = None
    slo_classes: str = ""
    default_slo_class: str | None = None
    enable_auto_tool_choice: bool = False
    tool_call_parser: ToolFormat | None = None
    reasoning_parser: ReasoningFormat | None = None

    def __post_init__(self) -> None:
        for name in ("port", "admin_port"):
            number = getattr(self, name)
            if number is not None and not 0 <= number <= 65535:
                raise BadInput(f"{_flag(name)} is out of range", value=number, limit="0..65535")
        for name in ("shutdown_timeout_s", *_WAITS, "keep_alive_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BadInput(
                    f"{_flag(name)} must be a non-negative number of seconds",
                    value=getattr(self, name),
                )
        for name in (*_COUNTS, *_RATES):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise BadInput(f"{_flag(name)} must be positive", value=number, limit=">= 1")
        if self.price_per_hour is not None and not 0 <= self.price_per_hour < float("inf"):
            raise BadInput(
                "--price-per-hour must be a non-negative number", value=self.price_per_hour
            )
        known = self.parsed_slo_classes
        if self.default_slo_class is not None and self.default_slo_class not in known:
            raise BadInput(
                "--default-slo-class is not one of --slo-classes",
                value=self.default_slo_class,
                limit=", ".join(known) or "--slo-classes is empty",
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
        """SLO of requests that name no class: the default class's, else the first one's."""
        classes = self.parsed_slo_classes
        return classes[self.default_slo_class or next(iter(classes))] if classes else None


_WAITS = ("header_timeout_s", "body_timeout_s", "send_timeout_s")
_COUNTS = (
    "max_body_bytes", "max_num_connections", "batch_store_max_bytes", "stream_interval",
)  # fmt: skip
_RATES = ("requests_per_minute", "tokens_per_minute")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def options_from(table: dict[str, Any], flags: dict[str, Any]) -> ServerOptions:
    """Options from the `[server]` table of a file, overridden by the flags that are not None."""
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return msgspec.convert({**table, **given}, ServerOptions)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(ServerOptions))
        raise BadInput(f"[server]: {error}", limit=f"known options: {known}") from None


def batch_app_options(options: ServerOptions) -> ServerOptions:
    """Options of the app that runs batch requests in this process.

    Keys and budgets were checked when the batch was uploaded: its requests carry no key.
    """
    return msgspec.structs.replace(
        options,
        api_key=None,
        api_keys_file=None,
        requests_per_minute=None,
        tokens_per_minute=None,
        batch_store=None,
        batch_window=None,
    )


def split_names(text: str) -> tuple[str, ...]:
    """The parts of a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_slo_classes(text: str) -> dict[str, Slo]:
    """`chat=ttft:500 tpot:50;bulk=e2e:60000` as SLOs by name, in order."""
    classes: dict[str, Slo] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, objectives = part.partition("=")
        if not equals or not name.strip().isidentifier() or name.strip() in classes:
            fix = "write e.g. 'chat=ttft:500 tpot:50;bulk=e2e:60000' (milliseconds)"
            raise BadInput("--slo-classes cannot be read", value=part, fix=fix)
        classes[name.strip()] = Slo.parse(objectives)
    return classes


def model_name(model: str) -> str:
    """The name of a model in the API: `demo` and `dummy:SHAPE` as they are, a directory's last part."""
    return PurePath(model).name or model
