"""The bodies of `/v1/completions` and `/v1/chat/completions`, read once and strictly.

Three kinds of field, and no fourth: *served* (declared below), *refused* (known to the API, would
change the answer, not built yet: a 400 that names it), and *ignored* (everything else: accepted,
and named in the response header `x-ridgeline-ignored-fields`, so that no field is ever dropped in
silence). A null is the same as leaving the field out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ridgeline.serve.errors import ApiError

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**31)]

REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None, {}),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "truncate_prompt_tokens": (None,),
    "spaces_between_special_tokens": (None, True),
    "return_tokens_as_token_ids": (None, False),
    "return_token_ids": (None, False),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "web_search_options": (None,),
    "thinking_token_budget": (None,),
}
"""Field → the values that change nothing and are therefore fine."""


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk with usage. `continuous_usage_stats`: usage in every chunk."""

    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Count, float] | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Count] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int64 | None = None
    cache_salt: str | None = None
    best_of: int | None = None


class CompletionRequest(_Request):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str] | list[Count] | list[list[Count]]
    echo: bool | None = None
    logprobs: int | None = None


class TextPart(BaseModel):
    """One piece of a message's content; the server reads text only."""

    model_config = ConfigDict(extra="allow")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation. Other fields (`name`) go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]


class ChatRequest(_Request):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: Literal[False] | None = None


Body = TypeVar("Body", CompletionRequest, ChatRequest)


def read(kind: type[Body], raw: bytes) -> Body:
    """The body as a record; ApiError 400 that names the field where it is not one."""
    try:
        request = kind.model_validate_json(raw)
    except ValidationError as error:
        raise _explain(error) from None
    _refuse(request)
    _check_streaming(request)
    return request


def ignored_fields(request: _Request) -> tuple[str, ...]:
    """Names of the fields that were sent, accepted and not looked at."""
    extra = {name for name in request.model_extra or {} if name not in REFUSED}
    nested = (request.stream_options and request.stream_options.model_extra) or {}
    return tuple(sorted(extra | {f"stream_options.{name}" for name in nested}))


def _refuse(request: _Request) -> None:
    for name, value in (request.model_extra or {}).items():
        if name in REFUSED and value not in REFUSED[name]:
            raise ApiError(
                400, f"{name} is not supported by this server; fix: leave {name} out", param=name
            )
    if request.best_of is not None and request.best_of != (request.n or 1):
        limit = f"got {request.best_of}; limit: n = {request.n or 1}"
        raise ApiError(400, f"best_of other than n is not supported; {limit}", param="best_of")


def _check_streaming(request: _Request) -> None:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream = true", param="stream_options")
    if request.stream and request.prompt_logprobs is not None:
        message = "prompt_logprobs is not available with stream = true; fix: do not stream"
        raise ApiError(400, message, param="prompt_logprobs")


def _explain(error: ValidationError) -> ApiError:
    """The first complaint of pydantic as one sentence that names the field."""
    first = error.errors(include_url=False, include_input=True, include_context=False)[0]
    where = ".".join(str(step) for step in _trail(first["loc"]))
    if not where:
        return ApiError(400, f"the request body is not a JSON object: {first['msg']}")
    given = "" if first["type"] == "missing" else f"; got {_short(first['input'])}"
    return ApiError(400, f"{where}: {first['msg']}{given}", param=where)


def _trail(location: tuple[int | str, ...]) -> list[int | str]:
    """The way to the field in the body, without pydantic's names for the branches of a union."""
    return [step for step in location if isinstance(step, int) or step.isidentifier()][:4]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
