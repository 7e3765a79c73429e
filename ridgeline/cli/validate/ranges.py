"""What the numbers of the command line may be: one row per option, looked at before a command
begins.

A number that cannot be must cost nothing: no model is loaded for it, nothing is measured, and it is
named as it was typed. Infinity passes where a row says so; what is no number (NaN) passes nowhere.
The records that these numbers enter (Settings, Sampling, Slo …) keep rules of their own, for files
and for programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple

from ridgeline.errors import BadInput

MOST_COUNT = 10**12  # of tokens, requests and steps: no machine comes near
MOST_BYTES = 1 << 60
MOST_SEED = 1 << 62  # runs add their number to it, and it must stay within 64 bits
LONGEST_S = 1e9  # thirty years
MOST_DOLLARS = 1e12


class Range(NamedTuple):
    """`least` is allowed itself, unless `open`."""

    least: float
    most: float
    open: bool = False

    def holds(self, value: float) -> bool:
        return self.least <= value <= self.most and not (self.open and value == self.least)

    def __str__(self) -> str:
        least = f"{'> ' if self.open else '>= '}{self.least:,}"
        return least if self.most == inf else f"{least}, <= {self.most:,}"


COUNT, NONE_TOO = Range(1, MOST_COUNT), Range(0, MOST_COUNT)
BYTES, SEED = Range(1, MOST_BYTES), Range(0, MOST_SEED)
SECONDS, NO_TIME_TOO = Range(0, LONGEST_S, open=True), Range(0, LONGEST_S)
MILLISECONDS = Range(0, 1000 * LONGEST_S)
SHARE, DOLLARS = Range(0, 1), Range(0, MOST_DOLLARS)
PRICE = Range(0, MOST_DOLLARS, open=True)
RATE = Range(0, 1e9, open=True)
SPEED = Range(0, 1e9, open=True)
PORT = Range(0, 65535)

RANGES: dict[str, Range] = {
    # the engine's
    "max_model_len": COUNT,
    "max_num_seqs": COUNT,
    "max_num_batched_tokens": COUNT,
    "kv_cache_memory_bytes": BYTES,
    "block_size": COUNT,
    "prefix_cache_ttl_s": NO_TIME_TOO,
    "batch_wait_ms": MILLISECONDS,
    "background_tokens": NONE_TOO,
    "num_threads": COUNT,
    "num_threads_decode": COUNT,
    "max_num_queued_reqs": COUNT,
    "max_num_queued_tokens": COUNT,
    "seed": SEED,
    # a server's
    "port": PORT,
    "admin_port": PORT,
    "shutdown_timeout_s": NO_TIME_TOO,
    "max_body_bytes": BYTES,
    "max_num_connections": COUNT,
    "stream_interval": COUNT,
    "requests_per_minute": COUNT,
    "tokens_per_minute": COUNT,
    "batch_store_max_bytes": BYTES,
    "price_per_hour": DOLLARS,
    # a request's
    "max_tokens": COUNT,
    "temperature": Range(0, 1e6),
    "top_p": Range(0, 1, open=True),
    # a load's
    "num_runs": Range(2, MOST_COUNT),
    "num_prompts": COUNT,
    "duration_s": SECONDS,
    "request_rate": Range(0, inf, open=True),  # infinite: all at once
    "burstiness": Range(0, inf, open=True),  # infinite: even
    "max_concurrency": COUNT,
    "ramp_up_start_rps": RATE,
    "ramp_up_end_rps": RATE,
    "replay_speed": SPEED,
    "random_input_len": COUNT,
    "random_output_len": COUNT,
    "random_prefix_len": NONE_TOO,
    "num_warmups": NONE_TOO,
    "warmup_s": NO_TIME_TOO,
    "cooldown_s": NO_TIME_TOO,
    "timeout_s": SECONDS,
    "ttft_ms": MILLISECONDS,
    "itl_ms": MILLISECONDS,
    "tokens_per_chunk": COUNT,
    "seats": COUNT,
    "interval": Range(0.05, LONGEST_S),
    "threshold": Range(0, 1e6),  # percent
    "budget": SECONDS,
    "start_timeout": SECONDS,
    "lm_eval_limit": Range(2, MOST_COUNT),
    # a plan's
    "isl": COUNT,
    "osl": COUNT,
    "batch": COUNT,
    "tp": COUNT,
    "pp": COUNT,
    "ep": COUNT,
    "cached": NONE_TOO,
    "num_speculative_tokens": NONE_TOO,
    "acceptance": SHARE,
    "rate": RATE,
    "max_devices": COUNT,
    "batch_share": SHARE,
    "replicas": COUNT,
    "decode_replicas": NONE_TOO,
    "autoscale": COUNT,
    "target_in_flight": Range(1e-3, 1e6),
    "startup_s": NO_TIME_TOO,
    "mtbf_s": Range(1, LONGEST_S),
    "repair_s": NO_TIME_TOO,
    "num_seeds": COUNT,
    "num_workers": COUNT,
    "prefix": NONE_TOO,
    "hit_rate": SHARE,
    "prefixes": COUNT,
    "spot_price": DOLLARS,
    "spot_interruptions": Range(0, 3600),  # an hour
    "spot_lost_s": NO_TIME_TOO,
    "owned_dollars": DOLLARS,
    "owned_years": Range(0, 1000, open=True),
    "watts": Range(0, 1e9),
    "dollars_per_kwh": DOLLARS,
    "pue": Range(1, 1000),
    # a model's that is made
    "bits_budget": Range(0, 64, open=True),
    "step_budget": Range(0, 1000 * LONGEST_S, open=True),
    "group_size": COUNT,
    "outlier_threshold": Range(0, 1e6, open=True),
    "calibration_windows": COUNT,
    "calibration_tokens": COUNT,
    "steps": COUNT,
    "own_tokens": NONE_TOO,
    "heads": COUNT,
    "tokens": COUNT,
    # where a command means something else by the name
    "optimize.price_per_hour": PRICE,  # 0 would make every configuration equally cheap
    "explain.request_rate": RATE,  # it says how many replicas carry it
    "plan.budget": PRICE,
    "plan.cached": SHARE,
    "train-drafter.rate": Range(0, 1, open=True),
}
"""By the option's name, or by `command.name` where that command's differs."""


def check_numbers(command: str, values: Mapping[str, Any]) -> None:
    """BadInput for the first number that is out of its range."""
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            allowed = range_of(command, name)
            if not allowed.holds(value):
                flag = "--" + name.replace("_", "-")
                raise BadInput(f"{flag} is out of range", value=value, limit=allowed)


def range_of(command: str, name: str) -> Range:
    """KeyError for an option without a row: a new number needs one."""
    return RANGES.get(f"{command}.{name}") or RANGES[name]
