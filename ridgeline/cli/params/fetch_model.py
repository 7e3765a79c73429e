"""Download the model that a command names, with a progress bar, before the command begins."""

from __future__ import annotations


def names_repository(name: str) -> bool:
    """Whether a name stands for a repository of safetensors on the Hugging Face Hub."""
    from ridgeline.hub.names import HubModel, parse_remote

    model = parse_remote(name)
    return isinstance(model, HubModel) and model.quantization is None


def fetch_model(name: str) -> str:
    """Download the model unless it is here; returns its name. Raises BadModel, DownloadFailed."""
    from ridgeline.hub.cache import find_cached
    from ridgeline.hub.names import parse_remote

    model = parse_remote(name)
    if model is not None and find_cached(model) is None:
        from ridgeline.cli.render.live_progress import live_progress
        from ridgeline.hub.download import download

        with live_progress() as observer:
            download(model, observer)
    return name
