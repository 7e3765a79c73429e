"""Where prefill and decode cannot run on different servers, and why."""

from __future__ import annotations

from ridgeline.config.settings import Settings
from ridgeline.engine.kv_tiers.requirements import require_whole_cache
from ridgeline.errors import BadInput, CannotRun
from ridgeline.modelspec.model import ModelSpec

_OPTIONS = {
    "disaggregation_host": ("prefill", "both"),
    "disaggregation_port": ("prefill", "both"),
    "disaggregation_peers": ("decode", "both"),
    "disaggregation_transfer_backend": ("prefill", "decode", "both"),
    "disaggregation_timeout_s": ("prefill", "decode", "both"),
}


def check_disaggregation(settings: Settings, spec: ModelSpec) -> None:
    """Refuse a role that cannot be played, and options that do nothing in the role."""
    mode, default = settings.disaggregation_mode, Settings()
    for name, modes in _OPTIONS.items():
        value = getattr(settings, name)
        if value != getattr(default, name) and mode not in modes:
            raise BadInput(
                f"--{name.replace('_', '-')} has no effect with --disaggregation-mode {mode}",
                value=str(value),
                fix=f"leave it out, or use --disaggregation-mode {modes[0]}",
            )
    if mode == "none":
        return
    flag = f"--disaggregation-mode {mode}"
    if not settings.enable_prefix_caching:
        raise BadInput(
            f"{flag} cannot be combined with --no-enable-prefix-caching",
            fix="leave one of them out: blocks are named and found by the prefix cache",
        )
    require_whole_cache(settings, spec, flag)
    if settings.kv_eviction_config is not None:
        raise CannotRun(
            f"{flag} cannot be combined with --kv-eviction-config",
            fix="leave one of them out: a cache that evicts keys has no whole blocks to hand over",
        )
