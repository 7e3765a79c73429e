"""The price of a request at an API provider: input, output, prompt caching, batch discount.

    automatic    OpenAI: prefixes of at least `min_prefix_tokens` are cached automatically; a hit is
                 read at `cached_read_share` of the input price, a miss written at
                 `cache_write_share` (1: no surcharge)
    breakpoint   Anthropic: a marked prefix is written at 1.25 times the input price for 5 minutes
                 or 2 times for an hour, refreshed by every hit, and read at a tenth
    stored       Gemini's explicit cache: written once at the input price, read at a tenth, and
                 charged per token and hour of storage

Prices are data with a date and a source; stale rows are rejected unless explicitly accepted.
"""

from __future__ import annotations

import math
import tomllib
from datetime import date
from importlib.resources import files
from typing import Literal

import msgspec

from ridgeline.errors import DECODE_ERRORS, BadInput

STALE_DAYS = 365
MILLION = 1e6


class LongPrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates of every token of a request whose prompt is longer than the price's `max_prompt`."""

    input: float
    output: float
    source: str


class ApiPrice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """USD per million tokens; shares are of the input price (`batch_share`: of the total).

    `model`: the architecture, by its planning name, that an open model's provider serves.
    `max_prompt`: the longest prompt at these rates (None: every one); `beyond` are those of longer
    ones (None: not known).
    """

    name: str
    model: str = ""
    provider: str
    rule: Literal["automatic", "breakpoint", "stored"]
    input: float
    output: float
    source: str
    as_of: str
    cached_read_share: float = 1.0
    cache_write_share: float = 1.0
    long_write_share: float | None = None
    storage_per_hour: float = 0.0
    min_prefix_tokens: int = 0
    batch_share: float = 1.0
    max_prompt: int | None = None
    beyond: LongPrompt | None = None
    note: str = ""

    def for_prompt(self, num_tokens: int) -> ApiPrice | None:
        """The price with the rates of prompts of `num_tokens`; None if these are not known."""
        if self.max_prompt is None or num_tokens <= self.max_prompt:
            return self
        if self.beyond is None:
            return None
        return msgspec.structs.replace(self, input=self.beyond.input, output=self.beyond.output)


class ApiUsage(msgspec.Struct, frozen=True, kw_only=True):
    """A workload as it is billed.

    `prefix` tokens of each prompt are shared with other requests and are found in the cache by
    `hit_rate` of the requests; `num_prefixes` such prefixes are stored for a total of `rate`
    requests per second. `batch`: sent to the batch API. `long_lived`: cached for an hour.
    """

    isl: int
    osl: int
    rate: float
    prefix: int = 0
    hit_rate: float = 0.0
    num_prefixes: int = 1
    batch: bool = False
    long_lived: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.prefix <= self.isl:
            raise BadInput(
                "the shared prefix exceeds the prompt", value=self.prefix, limit=self.isl
            )
        if not 0 <= self.hit_rate <= 1:
            raise BadInput("the hit rate must be a share", value=self.hit_rate, limit="0..1")
        if min(self.isl, self.osl, self.num_prefixes) < 1 or not self.rate > 0:
            raise BadInput("tokens, prefixes and the rate must be positive", value=self.rate)


class RequestCost(msgspec.Struct, frozen=True, kw_only=True):
    """USD per request by item. `caches`: the prefix is long enough to be cached."""

    input: float
    cached_read: float
    cache_write: float
    storage: float
    output: float
    caches: bool

    @property
    def total(self) -> float:
        return self.input + self.cached_read + self.cache_write + self.storage + self.output


def load_prices(text: str | None = None) -> dict[str, ApiPrice]:
    """Prices by name; `text` (TOML) replaces the built-in rows. Raises BadInput if malformed."""
    if text is None:
        text = files("ridgeline.plan.cost").joinpath("api_prices.toml").read_text(encoding="utf-8")
    try:
        rows = msgspec.convert(tomllib.loads(text).get("price", []), list[ApiPrice])
    except DECODE_ERRORS as error:
        raise BadInput("the price file is malformed", fix=str(error)) from None
    for row in rows:
        if not row.source.strip():
            raise BadInput("a price has no source", value=row.name)
        if min(row.input, row.output, row.cached_read_share, row.batch_share) < 0:
            raise BadInput("a price is negative", value=row.name)
        age_days(row.name, row.as_of, date.max)
    return {row.name: row for row in rows}


def age_days(name: str, as_of: str, today: date) -> int:
    """Days between `as_of` (2026-08 or 2026-08-31) and today. Raises BadInput for other formats."""
    try:
        looked_up = date.fromisoformat(as_of if len(as_of) == 10 else f"{as_of}-01")
    except ValueError:
        raise BadInput("a price has no date", value=f"{name}: {as_of!r}") from None
    return (today - looked_up).days


def check_fresh(name: str, as_of: str, today: date, *, accept_stale: bool) -> str | None:
    """None for a current price, a warning for an accepted stale one; otherwise raises BadInput."""
    age = age_days(name, as_of, today)
    if age <= STALE_DAYS:
        return None
    if accept_stale:
        return f"the price of {name} is {age} days old ({as_of})"
    raise BadInput(
        f"the price of {name} is stale",
        value=f"{age} days old ({as_of})",
        limit=f"{STALE_DAYS} days",
        fix="pass current prices with --prices, or use --accept-stale",
    )


def request_cost(price: ApiPrice, usage: ApiUsage) -> RequestCost:
    """USD of one mean request. Raises BadInput where the rates of such a prompt are not known."""
    tier = price.for_prompt(usage.isl)
    if tier is None:
        raise BadInput(
            f"the rates of {price.name} for long prompts are not known",
            value=f"{usage.isl} tokens",
            limit=f"{price.max_prompt} tokens",
        )
    price = tier
    caches = usage.prefix >= max(1, price.min_prefix_tokens) and price.cached_read_share < 1
    prefix = usage.prefix if caches else 0
    discount = price.batch_share if usage.batch else 1.0
    per_token = price.input / MILLION * discount
    return RequestCost(
        input=(usage.isl - prefix) * per_token,
        cached_read=prefix * usage.hit_rate * price.cached_read_share * per_token,
        cache_write=prefix * (1 - usage.hit_rate) * _write_share(price, usage) * per_token,
        storage=_storage(price, usage, prefix),
        output=usage.osl * price.output / MILLION * discount,
        caches=caches,
    )


def _write_share(price: ApiPrice, usage: ApiUsage) -> float:
    if usage.long_lived and price.long_write_share is not None:
        return price.long_write_share
    return price.cache_write_share


def _storage(price: ApiPrice, usage: ApiUsage, prefix: int) -> float:
    # The storage of all prefixes, divided by the requests of an hour.
    per_hour = usage.num_prefixes * prefix * price.storage_per_hour / MILLION
    return per_hour / (usage.rate * 3600)


def break_even_reuses(price: ApiPrice, *, long_lived: bool = False) -> int:
    """Number of reads after which caching a prefix pays, without storage costs."""
    extra = (price.long_write_share or price.cache_write_share) if long_lived else None
    write = price.cache_write_share if extra is None else extra
    if price.cached_read_share >= 1:
        raise BadInput("this price has no discount for cached input", value=price.name)
    return max(1, math.ceil((write - 1) / (1 - price.cached_read_share)))


def break_even_reads_per_hour(price: ApiPrice) -> float:
    """Reads per hour above which a stored prefix pays for its storage."""
    return price.storage_per_hour / (price.input * (1 - price.cached_read_share))
