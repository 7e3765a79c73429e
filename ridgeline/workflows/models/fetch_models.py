"""Download the models that engine settings name."""

from __future__ import annotations

from ridgeline.config.settings import Settings
from ridgeline.hub.download import ensure_downloaded
from ridgeline.records.progress import Observer, silent
from ridgeline.workflows.device_check import check_device


def fetch_models(settings: Settings, observer: Observer = silent) -> None:
    """Download the model and its draft model, if they are not here yet.

    Raises BadModel, DownloadFailed, and BadInput or CannotRun for a device that is not here.
    """
    check_device(settings.device)
    ensure_downloaded(settings.model, observer)
    drafter = settings.speculative_config
    if drafter is not None and drafter.model:
        ensure_downloaded(drafter.model, observer)
