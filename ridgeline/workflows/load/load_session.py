"""Send loads to one target: an engine opened in this process, or a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ridgeline.config.load import BenchOptions
from ridgeline.errors import BadInput, UserError
from ridgeline.hardware.open_files import make_room_for_load
from ridgeline.measure.bench_options import most_at_once, run_bench, workload_of
from ridgeline.measure.client.accepted_prompts import AcceptedPrompts, PromptForm
from ridgeline.measure.client.engine_target import EngineTarget, RenderChat
from ridgeline.measure.client.http_target import (
    Endpoint,
    HttpTarget,
    connection_pool,
    first_model,
)
from ridgeline.measure.client.load_client import OnStart
from ridgeline.measure.client.target import LoadTarget
from ridgeline.measure.monitors.server_config import fetch_engine_info
from ridgeline.measure.results.event_log import RunContext
from ridgeline.measure.workload import ChatPrompt, plain_chat
from ridgeline.measure.workload.sharing import shared_share
from ridgeline.records import EngineInfo, RequestTrace, RunTrace
from ridgeline.records.progress import Caution, Observer, StageAdvanced, stage
from ridgeline.workflows.load.server_monitor import Observed, observe_run
from ridgeline.workflows.load.server_tokenizer import vocabulary_of
from ridgeline.workflows.models.fetch_models import fetch_models
from ridgeline.workflows.targets import (
    ModelOnDevice,
    RemoteServer,
    Target,
    engine_on_machine,
    server_on_device,
)

if TYPE_CHECKING:
    from ridgeline.engine.engine import Engine

NUM_SAMPLES = 200  # requests that the sharing of prefixes is estimated from


class LoadSession:
    """Runs loads against one target."""

    def __init__(self, observer: Observer, url: str | None, api_key: str | None) -> None:
        self._observer, self._url, self._api_key = observer, url, api_key

    async def run(self, options: BenchOptions) -> tuple[RunTrace, Observed]:
        """Send the load that the options describe."""

        async def send(on_start: OnStart) -> RunTrace:
            target = await self._open_target(options)
            try:
                return await _send_load(target, options, on_start, self._observer)
            finally:
                await target.close()

        return await observe_run(send, self._url, self._api_key)

    async def _open_target(self, options: BenchOptions) -> LoadTarget:
        raise NotImplementedError

    def device(self, run: RunTrace) -> ModelOnDevice | None:
        """The roofline that a finished run is compared with; None if it is unknown."""
        raise NotImplementedError


class EngineSession(LoadSession):
    """Loads for an engine in this process."""

    def __init__(self, engine: Engine, render_chat: RenderChat, observer: Observer) -> None:
        super().__init__(observer, None, None)
        self._engine, self._render_chat = engine, render_chat
        self._device = engine_on_machine(engine.resolved)

    async def _open_target(self, options: BenchOptions) -> LoadTarget:
        return EngineTarget(self._engine, render_chat=self._render_chat)

    def device(self, run: RunTrace) -> ModelOnDevice | None:
        return self._device


class ServerSession(LoadSession):
    """Loads for a server."""

    def __init__(self, server: RemoteServer, observer: Observer) -> None:
        super().__init__(observer, server.url, server.api_key)
        self._server = server
        self._accepted: AcceptedPrompts | None = None

    async def _open_target(self, options: BenchOptions) -> LoadTarget:
        server = self._server
        make_room_for_load(most_at_once(options))
        model = server.model or await first_model(server.url, api_key=server.api_key)
        target = HttpTarget(
            server.url,
            model,
            endpoint=server.endpoint,
            api_key=server.api_key,
            vocabulary=vocabulary_of(server.tokenizer),
            stream=options.stream,
        )
        await self._negotiate(target, options)
        target.info = await _server_info(server, model)
        return target

    async def _negotiate(self, target: HttpTarget, options: BenchOptions) -> None:
        """Find out how the server takes the prompts of this load; the first time, say so."""
        if self._accepted is not None:
            target.accepted = self._accepted
            return
        forms = prompt_forms(options, self._server.endpoint)
        try:
            self._accepted = await target.negotiate(forms)
        except BadInput:
            await target.close()
            raise
        for note in self._accepted.notes():
            self._observer(Caution(text=note))
        if self._accepted.form != "tokens" and "tokens" in forms:
            self._observer(Caution(text=_text_note(self._accepted.form, self._server.tokenizer)))

    def device(self, run: RunTrace) -> ModelOnDevice | None:
        return server_on_device(self._server, run.info)


def prompt_forms(options: BenchOptions, endpoint: Endpoint) -> tuple[PromptForm, ...]:
    """The forms in which the prompts of a load may be sent, the most exact first."""
    sample = workload_of(options).sample(NUM_SAMPLES, options.seed)
    kinds = {type(request.prompt) for request in sample}
    forms: list[PromptForm] = []
    if endpoint != "chat" and tuple in kinds:
        forms.append("tokens")
    if endpoint != "chat" and (kinds != {ChatPrompt} or endpoint == "completions"):
        forms.append("text")
    return (*forms, "chat") if endpoint != "completions" else tuple(forms)


def _text_note(form: PromptForm, tokenizer: str | None) -> str:
    sent = "chat messages" if form == "chat" else "text"
    if tokenizer is not None:
        return f"prompts of token ids are sent as {sent}, by the tokenizer of {tokenizer}"
    return (
        f"prompts of token ids are sent as {sent} of as many common words, about one token each: "
        "the server takes no ids, and its tokenizer is unknown (--tokenizer MODEL)"
    )


@contextmanager
def load_session(
    options: BenchOptions, target: Target, observer: Observer
) -> Iterator[LoadSession]:
    """A session on the target; an engine is loaded first, and closed at the end.

    Raises UserError if a name is unknown or the model cannot take the workload.
    """
    if isinstance(target, RemoteServer):
        server_on_device(target)  # an unknown name must not cost the run
        vocabulary_of(target.tokenizer)
        yield ServerSession(target, observer)
        return
    from ridgeline.workflows.open_engine import open_engine  # imports torch

    fetch_models(target, observer)
    with stage(observer, f"loading {target.model}"):
        engine = open_engine(target, observer)
    with engine:
        _check_prompts(engine, options)
        render_chat, note = chat_renderer(engine)
        if note:
            observer(Caution(text=note))
        yield EngineSession(engine, render_chat, observer)


async def _server_info(server: RemoteServer, model: str) -> EngineInfo | None:
    wire, prefix = connection_pool(server.url, server.api_key)
    try:
        return await fetch_engine_info(wire, prefix, model)
    finally:
        wire.close()


async def _send_load(
    target: LoadTarget, options: BenchOptions, on_start: OnStart, observer: Observer
) -> RunTrace:
    num_finished = 0

    def count(trace: RequestTrace) -> None:
        nonlocal num_finished
        num_finished += 1
        observer(
            StageAdvanced(stage="requests", completed=num_finished, total=options.max_requests)
        )

    with stage(observer, "requests", total=options.max_requests, unit="requests"):
        return await run_bench(target, options, on_finish=count, on_start=on_start)


def _check_prompts(engine: Engine, options: BenchOptions) -> None:
    """BadInput, before the load starts, if a model without a tokenizer would get text."""
    prompt = next(workload_of(options).sample(1, 0)).prompt
    if isinstance(prompt, tuple):
        return
    try:
        engine.tokenizer.encode("a")
    except UserError as error:
        raise BadInput(
            "this workload is text, and the model takes token ids only",
            value=options.workload,
            limit=error.what,
            fix="--workload synthetic:input=256,output=128",
        ) from None


def chat_renderer(engine: Engine) -> tuple[RenderChat, str]:
    """How conversations become prompts, with a note if the model has no chat template."""

    def template(chat: ChatPrompt) -> Sequence[int]:
        messages = [{"role": m.role, "content": m.content} for m in chat.messages]
        return engine.tokenizer.apply_chat_template(messages)

    try:
        engine.tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    except UserError as error:
        return plain_chat, f"conversations are sent as plain text: {error.what}"
    return template, ""


def run_context(options: BenchOptions, observed: Observed) -> RunContext:
    """What a log keeps besides the run, so that it can be diagnosed later as it is now."""
    requests = list(workload_of(options).sample(NUM_SAMPLES, options.seed))
    return RunContext(
        server=observed.server,
        machine=observed.machine,
        shared_prompt_share=shared_share(requests),
    )
