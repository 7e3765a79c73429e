"""What a server accepts as a prompt: token ids, text, or nothing but the messages of a chat.

Many gateways and hosted endpoints have no /v1/completions, take no token ids in it, or refuse the
fields `ignore_eos`, `temperature`, `max_tokens` or `stream_options`. One request for one token per
form finds out, before a load would fail as a whole. A form is given up when the server refuses it
without naming a field that can be left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from ridgeline.errors import BadInput
from ridgeline.measure.client.http_connection import OK, HttpConnectionError, HttpConnectionPool

PromptForm = Literal["tokens", "text", "chat"]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS: Mapping[PromptForm, str] = {"tokens": COMPLETIONS, "text": COMPLETIONS, "chat": CHAT}
NAMES: Mapping[PromptForm, str] = {
    "tokens": "token ids to /v1/completions",
    "text": "text to /v1/completions",
    "chat": "messages to /v1/chat/completions",
}
PROBE_PROMPTS: Mapping[PromptForm, dict[str, object]] = {
    "tokens": {"prompt": [20, 21, 22, 23]},
    "text": {"prompt": "Hello"},
    "chat": {"messages": [{"role": "user", "content": "Hello"}]},
}
OMISSIBLE = ("ignore_eos", "temperature", "stream_options")
MAX_TOKENS, MAX_COMPLETION_TOKENS = "max_tokens", "max_completion_tokens"
UNAUTHORISED, FORBIDDEN, TOO_MANY = 401, 403, 429
REFUSED, FAILED = (400, 422), (500, 502, 503, 504)
MAX_WAITS, MAX_WAIT_S = 4, 20.0
MAX_MESSAGE_CHARS = 120


class AcceptedPrompts(msgspec.Struct, frozen=True):
    """The form in which a server takes prompts, and the fields that it refuses.

    `renamed_max_tokens`: the length goes into `max_completion_tokens`.
    """

    form: PromptForm = "tokens"
    omitted: frozenset[str] = frozenset()
    renamed_max_tokens: bool = False

    def adapt(self, body: dict[str, object]) -> dict[str, object]:
        """The body without refused fields."""
        body = {name: value for name, value in body.items() if name not in self.omitted}
        if self.renamed_max_tokens and MAX_TOKENS in body:
            body[MAX_COMPLETION_TOKENS] = body.pop(MAX_TOKENS)
        return body

    def without(self, message: str) -> AcceptedPrompts | None:
        """These prompts without the field that a refusal names; None if it names none."""
        if MAX_COMPLETION_TOKENS in message and not self.renamed_max_tokens:
            return msgspec.structs.replace(self, renamed_max_tokens=True)
        for name in OMISSIBLE:
            if name in message and name not in self.omitted:
                return msgspec.structs.replace(self, omitted=self.omitted | {name})
        return None

    def notes(self) -> list[str]:
        """What a reader of the results has to know about the refused fields."""
        notes = []
        if "ignore_eos" in self.omitted:
            notes.append("the server refuses ignore_eos: answers may be shorter than requested")
        if "temperature" in self.omitted:
            notes.append("the server refuses temperature 0: answers are sampled")
        if "stream_options" in self.omitted:
            notes.append("the server refuses stream_options and may not report token counts")
        return notes


ANY_FORM: tuple[PromptForm, ...] = ("tokens", "text", "chat")


async def find_accepted_prompts(
    pool: HttpConnectionPool,
    prefix: str,
    model: str,
    forms: Sequence[PromptForm] = ANY_FORM,
    *,
    stream: bool = True,
) -> AcceptedPrompts:
    """The first of `forms` that the server accepts.

    Raises BadInput if it accepts none, does not answer, or refuses the key.
    """
    refusals, has_failed = [], False
    for form in forms:
        accepted: AcceptedPrompts | None = AcceptedPrompts(form)
        while accepted is not None:
            status, message = await _ask(pool, prefix, model, accepted, stream)
            if status == OK:
                return accepted
            if status in (UNAUTHORISED, FORBIDDEN):
                raise BadInput(
                    "the server refuses the API key",
                    value=f"HTTP {status}",
                    fix="give its key with --api-key or RIDGELINE_API_KEY",
                )
            accepted = accepted.without(message) if status in REFUSED else None
            has_failed = has_failed or status in FAILED
        refusals.append(f"{NAMES[form]}: HTTP {status} {message[:MAX_MESSAGE_CHARS]}".rstrip())
    if has_failed:  # it is in trouble, which the load will show
        return AcceptedPrompts(forms[0])
    raise BadInput(
        "the server accepts no prompt of this load",
        value=model,
        limit="; ".join(refusals),
        fix="check --served-model-name and --endpoint",
    )


async def _ask(
    pool: HttpConnectionPool, prefix: str, model: str, accepted: AcceptedPrompts, stream: bool
) -> tuple[int, str]:
    """Status and message of a request for one token, after the waits that a rate limit asks for."""
    body: dict[str, object] = {
        "model": model,
        "max_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        **PROBE_PROMPTS[accepted.form],
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    path, content = prefix + PATHS[accepted.form], msgspec.json.encode(accepted.adapt(body))
    for _ in range(MAX_WAITS):
        try:
            reply = await pool.post(path, content, lambda received: None)
        except HttpConnectionError as error:
            raise BadInput(
                "the server does not answer", value=path, fix=f"start it or correct --url ({error})"
            ) from None
        if reply.status != TOO_MANY:
            return reply.status, reply.body.decode("utf-8", "replace").strip()
        wait = reply.headers.get("retry-after", "1")
        await asyncio.sleep(min(float(wait) if wait.isdigit() else 1.0, MAX_WAIT_S))
    raise BadInput(
        "the server limits the rate of requests (HTTP 429)",
        value=f"{MAX_WAITS} requests for one token",
        fix="raise the limit of this key, or measure the server behind the gateway that sets it",
    )


COMMON_ENGLISH = """
the of and to in is you that it he was for on are as with his they at be this have from or
one had by word but not what all were we when your can said there use an each which she do
how their if will up other about out many then them these so some her would make like him
into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part
"""


def words_for(tokens: Sequence[int]) -> str:
    """As many common English words as there are ids, equal words for equal ids.

    With most tokenizers a common word is one token. Used where a server takes no token ids and its
    tokenizer is unknown.
    """
    words = COMMON_ENGLISH.split()
    return " ".join(words[token % len(words)] for token in tokens)


CountTokens = Callable[[str], int]


class Vocabulary(NamedTuple):
    """How token ids become text, and how the tokens of a text are counted (None: not at all)."""

    decode: Callable[[Sequence[int]], str] = words_for
    count_tokens: CountTokens | None = None
    name: str = ""


COMMON_WORDS = Vocabulary()
"""For a server whose tokenizer is unknown."""
