"""Serve as a node other than 0: compute for the server of node 0."""

from __future__ import annotations

from ridgeline.config.settings import Settings
from ridgeline.records.progress import Message, Observer, silent
from ridgeline.workflows.models.fetch_models import fetch_models


def serve_node(settings: Settings, observer: Observer = silent) -> None:
    """Compute the ranks of this node until node 0 ends. Raises BadInput, CannotRun, RankFailed."""
    from ridgeline.engine.parallel.nodes import run_node  # imports torch

    fetch_models(settings, observer)
    where = f"node {settings.node_rank} of {settings.nnodes}"
    observer(Message(text=f"{where}: computing for {settings.master_addr}"))
    run_node(settings)
