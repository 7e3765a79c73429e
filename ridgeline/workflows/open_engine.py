"""Open an engine, and report a context that was lowered to fit the memory."""

from __future__ import annotations

from ridgeline.config.settings import Settings
from ridgeline.engine.engine import Engine
from ridgeline.records.progress import Message, Observer, silent


def open_engine(settings: Settings, observer: Observer = silent) -> Engine:
    """Download what is missing, load and start an engine.

    Raises BadModel, BadInput, CannotRun, DoesNotFit or DownloadFailed.
    """
    engine = Engine.from_settings(settings)
    resolved = engine.resolved
    if settings.max_model_len is None and resolved.max_model_len < resolved.spec.max_positions:
        why = resolved.derivations["max_model_len"]
        observer(Message(text=f"context of {resolved.max_model_len:,} tokens, {why}"))
    return engine
