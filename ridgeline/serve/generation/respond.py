"""From a job to an HTTP answer, the same way for every voice: whole, or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.records import Token
from ridgeline.serve.errors import ApiError
from ridgeline.serve.generation.collect import Tally, gather
from ridgeline.serve.generation.event_stream import OPENAI_FRAMES, EventStream, Frames, encode, sse
from ridgeline.serve.generation.stream import Job, RequestGroup, TakeBack, Update
from ridgeline.serve.http.native_writer import Around, Carried
from ridgeline.serve.http.stream_writer import Outlet, UntilGone
from ridgeline.serve.openai.schemas import Sampled

_HOLE = "\0"  # nothing else in a chunk is this
IGNORED_HEADER = "x-ridgeline-ignored-fields"


class Voice(Protocol):
    """How one endpoint words its answers. A stream is `opening`, `news` per update, `closing`."""

    frames: Frames

    def whole(self, tally: Tally) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...

    def opening(self, tally: Tally) -> list[bytes]: ...

    def news(self, update: Update, tally: Tally) -> list[bytes]: ...

    def brief(self, choice: int, text: str) -> bytes | None:
        """The news of a token that came alone, where its text is all there is to say of it; None
        where `news` has to say it. The choice has begun."""
        ...

    def around(self) -> Around | None:
        """Of the only choice, where the text of every token but those that come with its end is
        all there is to say of it: what stands around it."""
        ...

    def was_opened(self) -> None:
        """What `around` says was sent, at least the opening."""
        ...

    def closing(self, tally: Tally) -> list[bytes]: ...


class Wording(Protocol):
    """How one endpoint of the OpenAI family words its choices."""

    answer_object: str
    chunk_object: str

    def chunks(self, update: Update) -> list[dict[str, Any]]:
        """One `choices` entry per chunk to send for this update."""
        ...

    def only_text(self, update: Update) -> str | None:
        """The update's text, where its chunk says that and nothing else; the chunk is then one
        with `text_entry`. None where `chunks` has to be asked."""
        ...

    def opening_entries(self) -> list[dict[str, Any]] | None:
        """What opens the only choice, one entry per chunk, where all its tokens' chunks are ones
        with `text_entry`; None where they are not."""
        ...

    def was_opened(self) -> None:
        """Somebody has sent `opening_entries`."""
        ...

    def text_entry(self, choice: int, text: str) -> dict[str, Any]: ...

    def choices(self, tally: Tally) -> list[dict[str, Any]]: ...

    def extras(self, tally: Tally) -> dict[str, Any]: ...


class Envelope(msgspec.Struct, frozen=True):
    """What every JSON object of one answer repeats."""

    id: str
    created: int
    model: str

    def wrap(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


class UsageWanted(msgspec.Struct, frozen=True):
    """Where a stream tells its usage: in a last chunk, and in every chunk. `timings`: and beside
    it when things happened."""

    at_end: bool = False
    always: bool = False
    timings: bool = False


class OpenAiVoice:
    """A `Voice` that wraps a wording's choices as OpenAI does.

    Most chunks of a stream differ in their text alone: what stands around it is written once per
    choice.
    """

    frames = OPENAI_FRAMES

    def __init__(self, wording: Wording, job: Job, model: str, wanted: UsageWanted) -> None:
        self._wording, self._wanted = wording, wanted
        self._envelope = Envelope(job.id, int(time.time()), model)
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def whole(self, tally: Tally) -> dict[str, Any]:
        choices = self._wording.choices(tally)
        more = {**self._usage(tally), **self._wording.extras(tally)}
        return self._envelope.wrap(self._wording.answer_object, choices, **more)

    def opening(self, tally: Tally) -> list[bytes]:
        return []

    def news(self, update: Update, tally: Tally) -> list[bytes]:
        text = None if self._wanted.always else self._wording.only_text(update)
        if text is not None:
            head, tail = self._around.get(update.choice) or self._write_around(update.choice)
            return [head + encode(text) + tail]
        usage = {"usage": tally.usage()} if self._wanted.always else {}
        wrap, kind = self._envelope.wrap, self._wording.chunk_object
        return [sse(wrap(kind, [entry], **usage)) for entry in self._wording.chunks(update)]

    def brief(self, choice: int, text: str) -> bytes | None:
        around = self._around.get(choice)  # known once a token was only text: so are all others
        return None if around is None else around[0] + encode(text) + around[1]

    def around(self) -> Around | None:
        entries = None if self._wanted.always else self._wording.opening_entries()
        if entries is None:
            return None
        wrap, kind = self._envelope.wrap, self._wording.chunk_object
        opening = b"".join(sse(wrap(kind, [entry])) for entry in entries)
        return Around(opening, *self._write_around(0))

    def was_opened(self) -> None:
        self._wording.was_opened()

    def closing(self, tally: Tally) -> list[bytes]:
        if not self._wanted.at_end:
            return []
        return [sse(self._envelope.wrap(self._wording.chunk_object, [], **self._usage(tally)))]

    def _write_around(self, choice: int) -> tuple[bytes, bytes]:
        """What stands before and behind the text in the choice's chunks that are only text."""
        entry = self._wording.text_entry(choice, _HOLE)
        chunk = sse(self._envelope.wrap(self._wording.chunk_object, [entry]))
        head, _, tail = chunk.rpartition(encode(_HOLE))
        self._around[choice] = head, tail
        return head, tail

    def _usage(self, tally: Tally) -> dict[str, Any]:
        usage = {"usage": tally.usage()}
        return usage | {"metrics": tally.timings()} if self._wanted.timings else usage


async def answer(
    request: Request,
    job: Job,
    group: RequestGroup,
    voice: Voice,
    *,
    stream: bool,
    headers: dict[str, str],
) -> Response:
    """The response to a job, whose asks are aborted if the client leaves before its end."""
    tally = Tally(job, group)
    if stream:
        return EventStream(Telling(group, tally, voice), headers)
    async with UntilGone(request.scope, request.receive):
        await gather(group, tally)
    body = encode(voice.whole(tally))
    return Response(body, media_type="application/json", headers=headers)


class Telling:
    """A `Source` of events: what a voice makes of a job's updates."""

    def __init__(self, group: RequestGroup, tally: Tally, voice: Voice) -> None:
        self._group, self._tally, self._voice = group, tally, voice
        self.frames = voice.frames

    async def run(self, outlet: Outlet) -> bytes:
        """Ask, and put everything into `outlet` as it comes; what ends the last choice goes with
        the end. The first piece, which may be empty, is put when the engine has begun. Where a
        courier carries the tokens, what it left.

        Raises where the job is refused or breaks.
        """
        voice, tally, group, put = self._voice, self._tally, self._group, outlet.put
        last: list[bytes] = []
        has_begun = False

        def tell(updates: list[Update]) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                last.extend(voice.opening(tally))
            for update in updates:
                tally.count(update)
                last.extend(voice.news(update, tally))
            if not group.have_ended:
                put(last[0] if len(last) == 1 else b"".join(last))
                last.clear()

        def brief(choice: int, token: Token) -> bool:
            data = voice.brief(choice, token.text)
            if data is None:
                return False
            tally.count_token()
            put(data)
            return True

        def take_back(carried: Carried, left: bytes) -> None:
            nonlocal has_begun
            if carried.num_tokens:
                has_begun = True
                tally.count_carried(carried.num_tokens)
                voice.was_opened()
            outlet.take_back(left, has_begun=has_begun)

        self._send_by_courier(outlet, take_back)
        await group.run(tell, brief)
        return b"".join(last + voice.closing(tally))

    def _send_by_courier(self, outlet: Outlet, take_back: TakeBack) -> None:
        """Where there is one, and the answer is of a kind that it can carry."""
        if not self._group.can_be_carried:
            return
        around = self._voice.around()
        lent = None if around is None else outlet.lend(self._group.stop_courier)
        if around is not None and lent is not None:
            self._group.send_by_courier(lent, around, take_back)

    def close(self) -> None:
        self._group.close()


def usage_wanted(asked: Sampled, timings: bool) -> UsageWanted:
    """Where a request of the OpenAI family wants its usage told."""
    options = asked.stream_options
    if options is None:
        return UsageWanted(timings=timings)
    return UsageWanted(bool(options.include_usage), bool(options.continuous_usage_stats), timings)


def answer_headers(request_id: str, ignored: tuple[str, ...]) -> dict[str, str]:
    """The request's id, and the names of fields that were not looked at."""
    headers = {"x-request-id": request_id}
    if ignored:
        headers[IGNORED_HEADER] = _printable(",".join(ignored))[:1000]
    return headers


def request_id_of(headers: Mapping[str, str], field: str | None, fallback: str) -> str:
    """The client's own id for the request, from the header or the body; else `fallback`."""
    given = headers.get("x-request-id") or field
    if given is None:
        return fallback
    kept = _printable(given)[:200]
    if kept != given:
        raise ApiError(400, "the request id is not printable ASCII of at most 200 characters")
    return kept


def _printable(text: str) -> str:
    ascii_text = text.encode("ascii", "replace").decode()
    return "".join(character for character in ascii_text if character.isprintable())
