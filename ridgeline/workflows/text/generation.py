"""Answers to a batch of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from html import escape

from ridgeline.config.settings import Settings
from ridgeline.engine.completion import Completion
from ridgeline.engine.engine import Engine, Prompt
from ridgeline.records import Sampling
from ridgeline.records.progress import Observer, silent
from ridgeline.report.result import Result
from ridgeline.workflows.models.fetch_models import fetch_models
from ridgeline.workflows.open_engine import open_engine
from ridgeline.workflows.text.text_stream import ChatMessages, TextStream, prompt_tokens


class Generation(Result, frozen=True, kw_only=True):
    """The answers to one or more prompts, in the order of the prompts.

    `completions` have the token ids, the reason why each answer ended, and its usage.
    """

    model: str
    completions: tuple[Completion, ...]

    @property
    def text(self) -> str:
        """The answer to the first prompt."""
        return self.completions[0].text

    @property
    def texts(self) -> tuple[str, ...]:
        """The answer to each prompt."""
        return tuple(completion.text for completion in self.completions)

    def __str__(self) -> str:
        return "\n\n".join(self.texts)

    def _repr_html_(self) -> str:
        return "".join(f"<pre>{escape(text)}</pre>" for text in self.texts)


def generate(
    engine: Engine, prompts: Sequence[Prompt | ChatMessages], sampling: Sampling
) -> Generation:
    """Answer every prompt: a text, token ids, or a conversation. Errors as in `Engine.generate`."""
    tokens = [prompt_tokens(engine, prompt) for prompt in prompts]
    completions = engine.generate(tokens, sampling)
    return Generation(model=engine.info.model, completions=tuple(completions))


def open_stream(
    settings: Settings,
    prompt: Prompt | ChatMessages,
    sampling: Sampling,
    observer: Observer = silent,
) -> TextStream:
    """One answer piece by piece, from an engine that is loaded now and closed with the stream.

    Raises BadModel, BadInput, CannotRun, DoesNotFit or DownloadFailed.
    """
    fetch_models(settings, observer)
    return TextStream(partial(open_engine, settings, observer), prompt, sampling)
