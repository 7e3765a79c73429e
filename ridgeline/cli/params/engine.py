"""Engine flags, defined once: every field of `Settings` is a flag of every command that opens an
engine.

A command that takes `engine: EngineFlags` is decorated with `@takes_engine_flags`; Typer then
sees one option per setting in its place. A new setting needs one line in `HELP`, and nothing else
here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import typer

from ridgeline.cli.params.units import count_of, one_of, size_of, table_of
from ridgeline.config.settings import Settings, changed, load_settings, settings_from
from ridgeline.errors import BadInput

HELP = {
    "dtype": "Arithmetic of weights and activations; auto takes the model's own where it can run.",
    "device": "cpu, cuda, or auto.",
    "quantization": "Store the layers' weights in fewer bits, rounded to nearest (bf16: all, as "
    "the model does); `ridgeline quantize` loses less at 4 bits.",
    "lm_head_quantization": "Store the LM head in fewer bits too.",
    "activations": "How exactly activations meet weights of 8 and 4 bits: int8 (W4A8, W8A8), or "
    "int16 or float32 (weight-only), which take two and three times the arithmetic.",
    "max_model_len": "Longest prompt plus answer, in tokens (8k = 8000, 8K = 8192).",
    "max_num_seqs": "Most sequences that run at once.",
    "max_num_batched_tokens": "Token budget of one step.",
    "kv_cache_dtype": "How keys and values are kept; auto: as computed. int8 is lossy.",
    "kv_cache_memory_bytes": "Memory of the KV cache (512MiB, 4G).",
    "block_size": "Tokens per KV block.",
    "enable_prefix_caching": "Reuse the KV cache of prompts that begin alike.",
    "prefix_cache_ttl_s": "Forget unused cached prefixes after this many seconds.",
    "enable_chunked_prefill": "Split long prompts over steps, so that decoding goes on.",
    "batching": "How requests are put together.",
    "batch_wait_ms": "Dynamic batching: longest wait for a fuller batch.",
    "background_tokens": "Most tokens of batch lines beside people (default: derived).",
    "attention_backend": "Which attention computes; auto chooses and says why.",
    "layer_backend": "What computes the layers around attention; auto chooses and says why.",
    "num_threads": "Threads of the CPU's arithmetic (default: the cores that it may use).",
    "num_threads_decode": "Threads of steps of at most 16 rows (default: as --num-threads).",
    "thread_plan": "auto: both numbers of threads are measured when the engine opens.",
    "speculative_config": 'Speculative decoding, as vLLM\'s JSON: \'{"method": "ngram"}\'.',
    "max_num_queued_reqs": "Most requests that wait; the next one is refused with a time to retry.",
    "max_num_queued_tokens": "Most prompt tokens that wait.",
    "slo_throttle": "Admit fewer of a class while its p95 TTFT or TPOT breaks the promise.",
    "seed": "Seed of the draws of requests that bring none.",
}
_PANEL = "Engine"
_QUANTITIES: dict[str, Callable[[str], Callable[[str], int]]] = {
    "max_model_len": count_of,
    "max_num_seqs": count_of,
    "max_num_batched_tokens": count_of,
    "max_num_queued_reqs": count_of,
    "max_num_queued_tokens": count_of,
    "kv_cache_memory_bytes": size_of,
}
_TABLES = ("speculative_config",)


class EngineFlags:
    """The engine flags that were given, over a configuration file where one was."""

    def __init__(self, given: dict[str, Any], config: Path | None) -> None:
        self._given, self._config = given, config

    @property
    def config(self) -> Path | None:
        """The configuration file, where one was given."""
        return self._config

    @property
    def seed(self) -> int:
        """The seed as given, for loads as well as for draws."""
        return int(self._given.get("seed", 0))

    @property
    def given(self) -> list[str]:
        """The flags that were given, as written."""
        names = [*self._given, *(["config"] if self._config else [])]
        return ["--" + name.replace("_", "-") for name in names]

    def resolve(self, model: str | None) -> tuple[Settings, dict[str, Any]]:
        """Settings (file first, flags over it), and the file's `[server]` table."""
        base, server = load_settings(self._config) if self._config else (Settings(), {})
        given = {**self._given, "model": model} if model is not None else self._given
        return settings_from({**changed(base), **given}, where="flags"), server

    def settings(self, model: str | None) -> Settings:
        """Settings alone."""
        return self.resolve(model)[0]


def refuse(flags: Sequence[str], when: str) -> None:
    """BadInput for the first flag that would change nothing: no flag is ever dropped in silence."""
    idle = list(flags)
    if idle:
        raise BadInput(f"{idle[0]} has no effect {when}", fix=f"leave {idle[0]} out")


def takes_engine_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command` with one option per engine setting in place of its parameter `engine`."""
    fields = [field for field in msgspec.structs.fields(Settings) if field.name in HELP]
    return expand(command, "engine", [_config(), *map(_parameter, fields)], _gather)


def expand(
    command: Callable[..., Any],
    name: str,
    flags: Sequence[inspect.Parameter],
    gather: Callable[[dict[str, Any]], Any],
) -> Callable[..., Any]:
    """`command` with many options in place of its parameter `name`.

    What was given of them (an option left out is None) goes through `gather` and becomes `name`.
    """
    signature = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def wrapped(**values: Any) -> Any:
        asked = {flag.name: values.pop(flag.name) for flag in flags}
        given = {each: value for each, value in asked.items() if value is not None}
        return command(**values, **{name: gather(given)})

    own = [each for each in signature.parameters.values() if each.name != name]
    free = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *flags)]
    wrapped.__signature__ = signature.replace(parameters=free)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in free}
    return wrapped


def _gather(given: dict[str, Any]) -> EngineFlags:
    return EngineFlags(given, given.pop("config", None))


def _config() -> inspect.Parameter:
    text = "A ridgeline.toml; flags override it."
    option = typer.Option("--config", help=text, rich_help_panel=_PANEL, metavar="FILE")
    return optional("config", Annotated[Path | None, option])


def _parameter(field: msgspec.structs.FieldInfo) -> inspect.Parameter:
    """The option of one setting; None means that the flag was not given."""
    flag = "--" + field.name.replace("_", "-")
    kind = bare(field.type)
    shown: dict[str, Any] = {"help": _help(field), "rich_help_panel": _PANEL}
    if kind is bool:
        option = typer.Option(f"{flag}/--no-{flag[2:]}", **shown)
    elif field.name in _QUANTITIES:
        option = typer.Option(flag, parser=_QUANTITIES[field.name](flag), metavar="N", **shown)
        kind = int
    elif field.name in _TABLES:
        option = typer.Option(flag, parser=table_of(flag), metavar="JSON", **shown)
        kind = dict
    elif get_origin(kind) is Literal:
        choices = get_args(kind)
        option = typer.Option(
            flag, parser=one_of(flag, choices), metavar="|".join(choices), **shown
        )
        kind = str
    else:
        option = typer.Option(flag, **shown)
    return optional(field.name, Annotated[kind | None, option])


def _help(field: msgspec.structs.FieldInfo) -> str:
    default = field.default
    if default is None or default is msgspec.NODEFAULT:
        return HELP[field.name]
    if isinstance(default, bool):
        default = "on" if default else "off"
    return f"{HELP[field.name]} (default: {default})"


def bare(kind: Any) -> Any:
    """The type without `| None`."""
    if get_origin(kind) in (Union, UnionType):
        return next(each for each in get_args(kind) if each is not type(None))
    return kind


def optional(name: str, annotation: Any) -> inspect.Parameter:
    """A parameter that is None unless its option is given."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)
