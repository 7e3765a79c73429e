"""The bodies of `/v1/completions` and `/v1/chat/completions`, read once and strictly.

Three kinds of field, and no fourth: *served* (declared below), *refused* (known to the API, would
change the answer, not built yet: a 400 that names it), and *ignored* (everything else: accepted,
and named in the response header `x-ridgeline-ignored-fields`, so that no field is ever dropped in
silence). A null is the same as leaving the field out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import from_json

from ridgeline.serve.errors import ApiError

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
COUNTS = range(2**31)
Count = Annotated[int, Field(ge=0, lt=COUNTS.stop)]
Priority = Annotated[int, Field(ge=-100, le=100)]
Name = Annotated[str, Field(max_length=200)]


def are_counts(values: Any) -> bool:
    """A list of whole numbers in the range of `Count`, and not empty. A prompt's ids are many: this
    looks at them in three passes without a line of Python for each."""
    are_ints = type(values) is list and set(map(type, values)) == {int}
    return are_ints and min(values) in COUNTS and max(values) in COUNTS


def _prompts(values: Any, otherwise: ValidatorFunctionWrapHandler) -> Any:
    """Ids as they are: trying every shape in turn would word a complaint about each of them."""
    return values if are_counts(values) else otherwise(values)


Prompts = Annotated[str | list[str] | list[Count] | list[list[Count]], WrapValidator(_prompts)]
"""A text, several, a list of token ids, or several of those."""

REFUSED: dict[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "bad_words": (None, []),
    "spaces_between_special_tokens": (None, True),
    "chat_template": (None,),
    "documents": (None, []),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "thinking_token_budget": (None,),
}
"""Field → the values that change nothing and are therefore fine."""


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk with usage. `continuous_usage_stats`: usage in every chunk."""

    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SchemaFormat(BaseModel):
    """`json_schema` of a `response_format`. `strict` changes nothing: every answer conforms."""

    model_config = ConfigDict(extra="allow")
    name: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What the answer must look like, as OpenAI says it."""

    model_config = ConfigDict(extra="allow")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """What the answer must look like, as vLLM says it: one of these."""

    model_config = ConfigDict(extra="allow")
    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Sampled(BaseModel):
    """Fields that every generating endpoint of the OpenAI family shares."""

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
    priority: Priority | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    best_of: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    allowed_token_ids: list[Count] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: Name | None = None
    slo_class: Name | None = None
    timeout_ms: Annotated[float, Field(gt=0, le=86_400_000, allow_inf_nan=False)] | None = None


class CompletionRequest(Sampled):
    """Body of `POST /v1/completions`."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None


class TextPart(BaseModel):
    """One piece of a message's content; the server reads text only."""

    model_config = ConfigDict(extra="allow")
    type: Literal["text"]
    text: str


class FunctionName(BaseModel):
    """A function by its name."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.-]+$")]


class CalledFunction(FunctionName):
    """A call that was made: `arguments` is JSON text."""

    arguments: str = "{}"


class ToolCall(BaseModel):
    """A call in an assistant's message."""

    model_config = ConfigDict(extra="allow")
    id: Name | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Function(FunctionName):
    """A function that may be called; `parameters` is a JSON schema."""

    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """Something the model may call."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: Function


class Message(BaseModel):
    """One turn of a conversation. Other fields (`name`) go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Name | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant has tool_calls")
        return self


class NamedFunction(BaseModel):
    """The function that `tool_choice` insists on."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"] = "function"
    function: FunctionName


class ChatRequest(Sampled):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: Literal[False] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    include_reasoning: bool | None = None


Body = TypeVar("Body", bound=BaseModel)


def parse(kind: type[Body], raw: bytes) -> Body:
    """The body as a record; ApiError 400 that names the field where it is not one."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _explain(error, lambda: from_json(raw)) from None


def validated(kind: type[Body], fields: dict[str, Any]) -> Body:
    """As `parse`, for fields that were translated from another endpoint's."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _explain(error, lambda: fields) from None


Asked = TypeVar("Asked", CompletionRequest, ChatRequest)


def read(kind: type[Asked], raw: bytes) -> Asked:
    """As `parse`, for the generating endpoints of the OpenAI family."""
    request = parse(kind, raw)
    _refuse(request)
    _check_streaming(request)
    return request


_NESTED = {"stream_options", "response_format", "structured_outputs"}


def ignored_fields(request: Sampled) -> tuple[str, ...]:
    """Names of the fields that were sent, accepted and not looked at."""
    ignored = [name for name in request.model_extra or () if name not in REFUSED]
    for part in _NESTED & request.model_fields_set:
        nested = getattr(request, part)
        ignored += [f"{part}.{name}" for name in (nested and nested.model_extra) or ()]
    return tuple(sorted(ignored))


def _refuse(request: Sampled) -> None:
    for name, value in (request.model_extra or {}).items():
        if name in REFUSED and value not in REFUSED[name]:
            raise ApiError(
                400, f"{name} is not supported by this server; fix: leave {name} out", param=name
            )
    if request.best_of is not None and request.best_of != (request.n or 1):
        limit = f"got {request.best_of}; limit: n = {request.n or 1}"
        raise ApiError(400, f"best_of other than n is not supported; {limit}", param="best_of")


def _check_streaming(request: Sampled) -> None:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream = true", param="stream_options")
    if request.stream and request.prompt_logprobs is not None:
        message = "prompt_logprobs is not available with stream = true; fix: do not stream"
        raise ApiError(400, message, param="prompt_logprobs")


def _explain(error: ValidationError, sent: Callable[[], Any]) -> ApiError:
    """The first complaint of pydantic as one sentence that names the field. `sent`: the body."""
    first = error.errors(include_url=False, include_input=True, include_context=False)[0]
    if not first["loc"]:
        return ApiError(400, f"the request body is not a JSON object: {first['msg']}")
    is_missing = first["type"] == "missing"
    trail = _trail(first["loc"], sent(), first["input"])
    where = ".".join(map(str, [*trail, *(first["loc"][-1:] if is_missing else ())][:4]))
    given = "" if is_missing else f"; got {_short(first['input'])}"
    return ApiError(400, f"{where}: {first['msg']}{given}", param=where)


def _trail(location: tuple[int | str, ...], body: Any, complained: Any) -> list[int | str]:
    """The way in the body to the value that is complained of. Steps that are not on it are
    pydantic's names for the branches of a union."""
    trail: list[int | str] = []
    at = body
    for step in location:
        if at == complained:
            break
        is_index = isinstance(at, list) and isinstance(step, int) and step < len(at)
        if is_index or (isinstance(at, dict) and step in at):
            at = at[step]
            trail.append(step)
    return trail


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
