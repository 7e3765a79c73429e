"""Explain settings, techniques, metrics, flags or errors."""

from __future__ import annotations

from typing import Unpack

from ridgeline.api.keywords import download_models, engine_settings, options_from
from ridgeline.config.settings import EngineSettings
from ridgeline.config.tools import ExplainOptions
from ridgeline.records.progress import Observer, silent
from ridgeline.workflows.explain import explain_subject
from ridgeline.workflows.explain.explain_subject import Explanation


def explain(
    subject: str | None = None,
    model: str | None = None,
    *,
    workload: str | None = None,
    slo: str | None = None,
    request_rate: float | None = None,
    accelerator: str | None = None,
    observer: Observer = silent,
    **settings: Unpack[EngineSettings],
) -> Explanation:
    """Explain a model's settings, a topic, or whether speculative decoding pays.

    >>> import ridgeline
    >>> ridgeline.explain("demo", max_num_seqs=3).model.derivations["max_num_seqs"]
    'as requested'
    >>> "metric" in ridgeline.explain("topics").topics
    True

    Args:
        subject: A model, or a topic (`ridgeline explain topics`) (default: demo).
        model: The model for which a topic is explained. A topic of several words needs no quotes
            (default: demo).
        workload: Requests to send: chat-and-code, chat, code,
            synthetic:input=256,output=128, synthetic-chat, rag, code-edit, long-document,
            batch, FILE.jsonl, or recorded traffic: sharegpt:FILE, conversations:FILE,
            azure:FILE, burstgpt:FILE, mooncake:FILE (default: chat-and-code).
        slo: Latency limits in milliseconds: 'ttft:200 tpot:50 e2e:5000 error:1%' (default:
            ttft:500 tpot:50).
        request_rate: Requests per second, Poisson arrivals.
        accelerator: Accelerator of the catalogue whose memory and peaks count, one device of it
            (default: this machine).
        observer: Called with every progress event; `print` shows them as lines.
        settings: Engine settings of the model.

    Returns:
        The explanation.

    Raises:
        UserError: An option is wrong, or what it describes cannot run.
    """
    options = options_from(ExplainOptions, locals())
    return explain_subject.explain(
        options, lambda name: download_models(engine_settings(name, settings), observer), observer
    )
