"""Refuse a device that is not here before anything is downloaded for it."""

from __future__ import annotations


def check_device(name: str) -> None:
    """Raises BadInput for a name of no device, CannotRun for a device that cannot be used here.

    Imports torch only for a device that it has to ask for.
    """
    if name in ("auto", "cpu"):
        return
    from ridgeline.engine.device import choose_device

    choose_device(name, {})
