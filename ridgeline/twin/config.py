"""What a twin imitates: a model in its formats, the devices, and the limits of its scheduler."""

from __future__ import annotations

from typing import Literal

import msgspec

from ridgeline.errors import BadInput
from ridgeline.plan.step_time.simulated import HostTime
from ridgeline.records import KvEviction

MAX_REPLICAS = 64  # each has a thread of its own
STAND_IN = "demo"
"""The model whose tokenizer a twin uses if its own has no files here."""


class TwinDrafter(msgspec.Struct, frozen=True):
    """What drafts tokens. `kind`: "lookup" costs nothing; a "head" is one layer on the model's last
    hidden states (EAGLE, MTP), with the model's output layer; a "model" is the `checkpoint`.
    """

    kind: Literal["none", "lookup", "head", "model"]
    checkpoint: str = ""


NO_DRAFTER = TwinDrafter("none")


class TwinConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One server to imitate.

    `device` is a name of the catalogue. `tp` · `cp` devices hold each of the `dp` replicas; `cp` of
    them divide the KV cache of every sequence, and with `sp` the `tp` of them each normalise a part
    of the rows. Formats None:
    as stored. Limits None: the defaults of the server. With `caps_context` a `max_model_len` beyond
    the model's context is cut to it, not refused. `utilization`: the share of the device's
    memory that is used. `kv_tokens` None: what the memory budget leaves. `acceptance`: the
    probability that each of `num_speculative_tokens` drafts of the `drafter` is accepted. What the
    prefix cache evicts goes to host memory of `offload_bytes`, or of `offload_ratio` times the
    cache's own. `background_tokens`: of batch requests in a step with interactive ones. `speed`:
    modelled seconds per real second. `noise_nats`: standard deviation of the noise on the
    log-probabilities of the synthetic answers, which stands for the loss of a format (None: by
    format).
    """

    model: str
    device: str
    tp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    sp: bool = False
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    caps_context: bool = False
    utilization: float = 0.9
    block_size: int = 16
    kv_tokens: int | None = None
    batching: str = "continuous"
    batch_wait_ms: float | None = None
    enable_prefix_caching: bool = True
    prefix_cache_ttl_s: float | None = None
    prefix_pin_share: float = 0.5
    background_tokens: int | None = None
    kv_eviction: KvEviction | None = None
    enable_chunked_prefill: bool = True
    max_num_queued_reqs: int | None = 1024
    max_num_queued_tokens: int | None = 1 << 20
    num_speculative_tokens: int = 0
    acceptance: float = 0.0
    drafter: TwinDrafter = TwinDrafter("lookup")
    offload_bytes: int = 0
    offload_ratio: float = 0.0
    host: HostTime = HostTime()
    noise_nats: float | None = None
    speed: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise BadInput("--speed must be positive", value=self.speed, limit="> 0")
        if not 1 <= self.dp <= MAX_REPLICAS:
            raise BadInput(
                "the number of replicas of a twin is out of range",
                value=self.dp,
                limit=f"1..{MAX_REPLICAS}",
            )

    @property
    def num_devices(self) -> int:
        return self.dp * max(self.tp, self.ep) * self.cp

    @property
    def description(self) -> str:
        """`2 x h100-sxm, modelled`, and the speed if it is not 1."""
        speed = "" if self.speed == 1 else f", {self.speed:g} times as fast"
        return f"{self.num_devices} x {self.device}, modelled{speed}"


def parse_devices(text: str) -> tuple[str, int]:
    """The name and the number of devices of `h100-sxm` or `h100-sxm:8`. Raises BadInput."""
    name, colon, count = text.partition(":")
    if name in ("cpu", "cuda", "gpu", "mps", "rocm", "auto"):
        raise BadInput(
            "a twin imitates an accelerator of the catalogue, not a device of this machine",
            value=text,
            limit="NAME or NAME:COUNT",
            fix="for example --device h100-sxm:8; leave out --twin to run on this machine",
        )
    if not name or (colon and not (count.isdecimal() and 1 <= int(count) <= MAX_REPLICAS)):
        raise BadInput(
            "the device of a twin cannot be read",
            value=text,
            limit=f"NAME or NAME:COUNT, at most {MAX_REPLICAS}",
            fix="for example --device h100-sxm:8; `ridgeline predict --list-models` lists them",
        )
    return name, int(count or 1)
