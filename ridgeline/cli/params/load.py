"""The load flags of `ridgeline bench`, under the names of `vllm bench serve`.

Each row is a field of `ridgeline.measure.bench_options.BenchOptions`, which also holds the defaults; what
is not given is left to it. (`--seed` is an engine flag, and seeds the load too.)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ridgeline.cli.params.engine import expand, optional
from ridgeline.cli.params.units import one_of

WORKLOADS = (
    "chat-and-code, chat, code, synthetic:input=256,output=128, synthetic-chat, rag, code-edit, "
    "long-document, batch, a .jsonl file, or a recorded one: sharegpt:FILE, conversations:FILE, "
    "azure:FILE, burstgpt:FILE, mooncake:FILE."
)
ROWS: tuple[tuple[str, type, str], ...] = (
    ("workload", str, f"{WORKLOADS} (default: chat-and-code)"),
    ("num_prompts", int, "Requests to send. (default: 100)"),
    ("duration_s", float, "Seconds of load, instead of a number of requests."),
    ("request_rate", float, "Requests per second, Poisson; inf: no schedule. (default: inf)"),
    ("burstiness", float, "1 Poisson, below 1 burstier, above more even. (default: 1)"),
    ("max_concurrency", int, "Most requests in flight."),
    ("ramp_up_strategy", str, "linear or exponential: let the rate grow over the run."),
    ("ramp_up_start_rps", float, "Requests per second at the start of the ramp."),
    ("ramp_up_end_rps", float, "Requests per second at its end."),
    ("replay_speed", float, "Keep the recorded workload's instants, so many times as fast."),
    ("random_input_len", int, "Random prompts of so many tokens, in place of a workload."),
    ("random_output_len", int, "Tokens of their answers."),
    ("random_prefix_len", int, "Tokens that they have in common. (default: 0)"),
    ("ignore_eos", bool, "Every answer is as long as the workload asks. (default: on)"),
    (
        "stream",
        bool,
        "With --url: a whole answer is seen at its end only. (default: on)",
    ),
    ("goodput", str, "The promise in milliseconds: ttft:200 tpot:50."),
    ("percentile_metrics", str, "Metrics to show. (default: ttft,tpot,itl,e2e)"),
    ("metric_percentiles", str, "Percentiles to show. (default: 50,90,95,99)"),
    ("num_warmups", int, "Requests before the measurement. (default: 4)"),
    ("warmup_s", float, "Leave out what arrives in the first seconds. (default: 0)"),
    ("cooldown_s", float, "Leave out what arrives in the last seconds. (default: 0)"),
    ("timeout_s", float, "Longest wait for one answer. (default: 600)"),
)


REPORTS: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("html", Path, {"help": "Write a page with pictures.", "metavar": "FILE"}),
    ("trace", Path, {"help": "Write a Chrome trace, for Perfetto.", "metavar": "FILE"}),
    (
        "layout",
        str,
        {
            "help": "The console's: ridgeline or vllm. (default: ridgeline)",
            "parser": one_of("--layout", ("ridgeline", "vllm")),
        },
    ),
    (
        "accelerator",
        str,
        {"help": "With --url and MODEL: what it runs on, for MFU: h100-sxm, 4xh100-sxm, here."},
    ),
    ("price_per_hour", float, {"help": "What the machine costs, in dollars."}),
    ("num_runs", int, {"help": "Repeat, and give each figure an interval.", "min": 2}),
    ("sweep", str, {"help": "One run at each of these rates: 1,2,4."}),
    ("find_goodput", str, {"help": "Search LOW:HIGH for the largest rate that keeps --goodput."}),
)


def takes_report_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command` with the flags of what to repeat and write in place of its parameter `report`."""
    flags = [
        optional(name, Annotated[kind | None, typer.Option(_flag(name), **shown)])
        for name, kind, shown in REPORTS
    ]
    return expand(command, "report", flags, dict)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def takes_load_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command` with the load flags in place of its parameter `load`, a dict of those given."""
    flags = []
    for name, kind, text in ROWS:
        flag = _flag(name)
        declared = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
        option = typer.Option(declared, help=text)
        flags.append(optional(name, Annotated[kind | None, option]))
    return expand(command, "load", flags, dict)
