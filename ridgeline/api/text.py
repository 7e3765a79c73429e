"""Text from a model in this process: generate, stream, chat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Unpack

import msgspec

from ridgeline.api.keywords import engine_settings, options_from
from ridgeline.config.settings import EngineSettings
from ridgeline.config.tools import BatchFileOptions
from ridgeline.engine.engine import Engine
from ridgeline.errors import BadInput
from ridgeline.records import Sampling
from ridgeline.records.progress import Observer, silent
from ridgeline.workflows.serving.answer_batch import BatchFileResult, answer_batch
from ridgeline.workflows.text.conversation import CHAT_SAMPLING, Conversation
from ridgeline.workflows.text.generation import Generation
from ridgeline.workflows.text.generation import generate as generate_all
from ridgeline.workflows.text.text_stream import ChatMessages, TextStream

GENERATE_SAMPLING = Sampling(temperature=0.0, max_tokens=128)
"""The defaults of `generate` and `stream`."""


def generate(
    model: str | Engine,
    prompt: str | Sequence[str] | ChatMessages,
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: str | Sequence[str] = (),
    sampling: Sampling | None = None,
    **settings: Unpack[EngineSettings],
) -> Generation:
    """Answer a prompt, a list of prompts, or a conversation.

    >>> import ridgeline
    >>> answer = ridgeline.generate("demo", "def add(a, b):", max_tokens=8)
    >>> answer.completions[0].usage.completion_tokens
    8
    >>> chat = [{"role": "user", "content": "Write a loop."}]
    >>> len(ridgeline.generate("demo", chat, max_tokens=4).texts)
    1

    Args:
        model: A model directory, a name such as "demo" or "smollm2", a repository on the Hugging
            Face Hub, "dummy:SHAPE" (random weights), or an open `Engine`.
        prompt: A text; several texts, which are answered as one batch; or a conversation as
            messages with `role` and `content`, to which the model's chat template is applied.
        max_tokens: Maximum output tokens.
        temperature: Sampling temperature; 0 is greedy.
        top_p: Nucleus sampling.
        stop: Stop at this text, or at any of these.
        sampling: All sampling parameters, instead of the four above.
        settings: Engine settings, for a model that is not open yet.

    Returns:
        The answers. `print` shows their text.

    Raises:
        UserError: An option or prompt is wrong, or the model cannot run.
    """
    chosen = _sampling(sampling, GENERATE_SAMPLING, max_tokens, temperature, top_p, stop)
    prompts = _prompts(prompt)
    with _opened(model, settings) as engine:
        return generate_all(engine, prompts, chosen)


def stream(
    model: str | Engine,
    prompt: str | ChatMessages,
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: str | Sequence[str] = (),
    sampling: Sampling | None = None,
    **settings: Unpack[EngineSettings],
) -> TextStream:
    """Answer a prompt or a conversation piece by piece.

    Read the stream with `for`, or with `async for`. Leaving its `with` (or `async with`) block
    aborts an answer that is incomplete, and closes an engine that was opened for it.

    >>> import ridgeline
    >>> with ridgeline.stream("demo", "def add(a, b):", max_tokens=8) as pieces:
    ...     text = "".join(pieces)
    >>> text == pieces.reply.text, pieces.reply.finish_reason
    (True, 'length')

    Args:
        model: A model directory, a name such as "demo" or "smollm2", a repository on the Hugging
            Face Hub, "dummy:SHAPE" (random weights), or an open `Engine`.
        prompt: A text, or a conversation as messages with `role` and `content`.
        max_tokens: Maximum output tokens.
        temperature: Sampling temperature; 0 is greedy.
        top_p: Nucleus sampling.
        stop: Stop at this text, or at any of these.
        sampling: All sampling parameters, instead of the four above.
        settings: Engine settings, for a model that is not open yet.

    Returns:
        The stream; its `reply` has the text received so far, with its usage and speed.

    Raises:
        UserError: An option is wrong. The model is opened, and the prompt checked, when the first
            piece is read.
    """
    chosen = _sampling(sampling, GENERATE_SAMPLING, max_tokens, temperature, top_p, stop)
    return TextStream(_opener(model, settings), prompt, chosen)


def chat(
    model: str | Engine,
    *,
    system: str | None = None,
    max_tokens: int = 512,
    temperature: float = 0.7,
    top_p: float = 1.0,
    stop: str | Sequence[str] = (),
    sampling: Sampling | None = None,
    **settings: Unpack[EngineSettings],
) -> Conversation:
    """Begin a conversation that remembers its turns.

    >>> import ridgeline
    >>> with ridgeline.chat("demo", system="Be brief.", max_tokens=8) as conversation:
    ...     reply = conversation.send("Write a loop.")
    ...     with conversation.stream("And a test.") as pieces:
    ...         text = "".join(pieces)
    >>> [turn.role for turn in conversation.turns]
    ['system', 'user', 'assistant', 'user', 'assistant']

    Args:
        model: A model directory, a name such as "demo" or "smollm2", a repository on the Hugging
            Face Hub, "dummy:SHAPE" (random weights), or an open `Engine`.
        system: System prompt.
        max_tokens: Maximum output tokens of a reply.
        temperature: Sampling temperature; 0 is greedy.
        top_p: Nucleus sampling.
        stop: Stop at this text, or at any of these.
        sampling: All sampling parameters, instead of the four above.
        settings: Engine settings, for a model that is not open yet.

    Returns:
        The conversation: `send` a message, or `stream` the reply. Closing it closes an engine that
        was opened for it.

    Raises:
        UserError: An option is wrong, or the model cannot run.
    """
    chosen = _sampling(sampling, CHAT_SAMPLING, max_tokens, temperature, top_p, stop)
    engine = _opener(model, settings)
    if isinstance(engine, Engine):
        return Conversation(engine, system=system, sampling=chosen)
    return Conversation(engine(), system=system, sampling=chosen, close_engine=True)


def batch(
    file: str | Path,
    output: str | Path,
    *,
    model: str | None = None,
    served_model_name: str | None = None,
    observer: Observer = silent,
    **settings: Unpack[EngineSettings],
) -> BatchFileResult:
    """Answer a file of requests, without a server.

    An interrupted call resumes when it is repeated with the same arguments.

    >>> import ridgeline
    >>> result = ridgeline.batch(
    ...     "requests.jsonl", "answers.jsonl", model="demo"
    ... )  # doctest: +SKIP
    >>> result.completed, result.failed  # doctest: +SKIP
    (3, 0)

    Args:
        file: JSONL file of requests, in the format of /v1/batches.
        output: JSONL file for the answers.
        model: Name of a model: a directory, a .gguf file or its address,
            OWNER/REPO[@REVISION][:QUANTISATION] on the Hugging Face Hub, 'smollm2', 'demo', or
            'dummy:SHAPE' (random weights) (default: smollm2).
        served_model_name: Model name used in the file (default: the name of the model).
        observer: Called with every progress event; `print` shows them as lines.
        settings: Engine settings.

    Returns:
        How many requests were answered, the tokens, and the files.

    Raises:
        UserError: An option or the file is wrong, or the model cannot run.
    """
    options = options_from(BatchFileOptions, locals())
    return answer_batch(
        engine_settings(model, settings),
        options.file,
        options.output,
        served_model_name=options.served_model_name,
        observer=observer,
    )


def _prompts(
    prompt: str | Sequence[str] | ChatMessages,
) -> Sequence[str | Sequence[Mapping[str, object]]]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, Sequence):
        raise _not_a_prompt(type(prompt).__name__)
    texts = [item for item in prompt if isinstance(item, str)]
    messages = [item for item in prompt if isinstance(item, Mapping)]
    if texts and len(texts) == len(prompt):
        return texts
    if messages and len(messages) == len(prompt):
        return [messages]
    kinds = " and ".join(sorted({type(item).__name__ for item in prompt}))
    raise _not_a_prompt(f"a list of {kinds}" if kinds else "an empty list")


def _not_a_prompt(kind: str) -> BadInput:
    return BadInput(
        "a prompt is a text, a list of texts, or a list of chat messages",
        value=kind,
        fix='write texts, or messages such as {"role": "user", "content": "…"}',
    )


def _sampling(
    sampling: Sampling | None,
    default: Sampling,
    max_tokens: int,
    temperature: float,
    top_p: float,
    stop: str | Sequence[str],
) -> Sampling:
    """The keywords as sampling parameters, or `sampling` if they are those of the default."""
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "stop": [stop] if isinstance(stop, str) else list(stop),
    }
    try:
        keywords = msgspec.convert(given, Sampling)
    except msgspec.ValidationError as error:
        raise BadInput(f"wrong sampling parameter: {error}") from None
    if sampling is None:
        return keywords
    if keywords != default:
        raise BadInput(
            "sampling replaces max_tokens, temperature, top_p and stop",
            fix="set them in sampling",
        )
    return sampling


def _opener(model: str | Engine, settings: EngineSettings) -> Engine | Callable[[], Engine]:
    """The open engine, or a function that opens one. Raises BadInput for a wrong setting."""
    if isinstance(model, str):
        return partial(Engine.from_settings, engine_settings(model, settings))
    if not isinstance(model, Engine):
        raise BadInput("a model is a name or an open Engine", value=model)
    if settings:
        raise BadInput(
            "settings cannot be changed on an open engine",
            value=", ".join(settings),
            fix="give them to Engine.open",
        )
    return model


@contextmanager
def _opened(model: str | Engine, settings: EngineSettings) -> Iterator[Engine]:
    engine = _opener(model, settings)
    if isinstance(engine, Engine):
        yield engine
    else:
        with engine() as opened:
            yield opened
