"""Where tiers of the KV cache cannot work, and why."""

from __future__ import annotations

from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput, CannotRun
from ridgeline.modelspec.cost import has_states
from ridgeline.modelspec.model import ModelSpec


def check_tiers(settings: Settings, spec: ModelSpec) -> None:
    """Refuse tiers of the KV cache where nothing would ever be found in them."""
    if settings.kv_tier_size is not None and settings.kv_tier_dir is None:
        raise BadInput(
            "--kv-tier-size needs --kv-tier-dir",
            value=settings.kv_tier_size,
            fix="name the directory whose size it bounds",
        )
    options = ("kv_tier_memory", "kv_tier_dir", "kv_tier_url")
    asked = next((name for name in options if getattr(settings, name) is not None), None)
    if asked is None:
        return
    flag = "--" + asked.replace("_", "-")
    if not settings.enable_prefix_caching:
        raise BadInput(
            f"{flag} has no effect with --no-enable-prefix-caching",
            fix="leave one of them out: tiers extend the prefix cache",
        )
    require_whole_cache(settings, spec, flag)


def require_whole_cache(settings: Settings, spec: ModelSpec, flag: str) -> None:
    """Refuse `flag`, which moves blocks of the KV cache, unless one process has all of each block.

    Raises CannotRun.
    """
    for name in ("tensor", "pipeline", "expert", "context"):
        if (size := getattr(settings, f"{name}_parallel_size")) > 1:
            raise CannotRun(
                f"{flag} works with one process, which holds the whole KV cache",
                value=f"--{name}-parallel-size {size}",
                limit="1",
                fix="leave one of them out",
            )
    if has_states(spec):
        raise CannotRun(
            f"{flag} needs a model with a KV cache that can be shared",
            value=settings.model,
            limit="models without recurrent layers",
            fix="leave it out: recurrent layers keep one state per sequence",
        )
