"""Why a setting that the engine takes as it is has its value."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.config.settings import PlainSettings, Settings


def derive_plain(settings: Settings, why: Mapping[str, str]) -> dict[str, str]:
    """Derivations of plain settings: "as requested", "default", or why a default has no effect."""
    default = Settings()
    given = [name for name in PlainSettings.__struct_fields__ if name not in why]
    asked = {name for name in given if getattr(settings, name) != getattr(default, name)}
    unused = {
        name: f"no effect: {reason}"
        for is_off, reason, names in _unused_groups(settings)
        if is_off
        for name in names
    }
    return {
        name: "as requested" if name in asked else unused.get(name, "default") for name in given
    }


def _unused_groups(settings: Settings) -> tuple[tuple[bool, str, tuple[str, ...]], ...]:
    """Whether a feature is off, how to say so, and the settings that only it reads."""
    transfers = ("host", "port", "transfer_backend", "peers", "timeout_s")
    return (
        (
            not settings.enable_prefix_caching,
            "enable_prefix_caching is false",
            ("prefix_cache_ttl_s", "prefix_pin_share"),
        ),
        (
            settings.disaggregation_mode == "none",
            "disaggregation_mode is none",
            tuple(f"disaggregation_{name}" for name in transfers),
        ),
        (
            not settings.enable_lora,
            "enable_lora is false",
            ("lora_modules", "max_loras", "max_lora_rank"),
        ),
        (settings.nnodes == 1, "nnodes is 1", ("node_rank", "master_addr")),
        (settings.batching != "dynamic", "batching is not dynamic", ("batch_wait_ms",)),
    )
