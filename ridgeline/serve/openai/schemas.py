"""Request bodies of `/v1/completions` and `/v1/chat/completions`.

A field is either supported (declared below), refused (part of the API, would change the response,
and is not implemented: a 400 that names it), or ignored: accepted, and named in the response header
`x-ridgeline-ignored-fields`. A null is the same as leaving the field out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ridgeline.serve.bodies.fail_fast import RequestModel
from ridgeline.serve.config import LIMITS
from ridgeline.serve.errors import ApiError, from_validation

MAX_ENTRIES = 4096
"""Of a list of prompts; routes have lower limits."""
UINT31 = range(2**31)


def _refuse_boolean(value: Any) -> Any:
    """Python takes true for the integer 1: by accident a token id, a limit or a seed."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "Input should be a number, not true or false")
    return value


Integer = Annotated[int, BeforeValidator(_refuse_boolean)]
Number = Annotated[float, BeforeValidator(_refuse_boolean)]
Int64 = Annotated[Integer, Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[Integer, Field(ge=0, lt=UINT31.stop)]
PromptLength = Annotated[Integer, Field(ge=1, lt=2**31)]
Priority = Annotated[Integer, Field(ge=-100, le=100)]
Name = Annotated[str, Field(max_length=200)]
FunctionId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.-]+$")]
CacheSalt = Annotated[str, Field(min_length=1, max_length=512)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def are_counts(values: Any) -> bool:
    """Whether this is a non-empty list of integers in the range of `Count`. Prompts have many
    token ids: this needs three passes in C, and no line of Python per id."""
    are_ints = type(values) is list and set(map(type, values)) == {int}
    return are_ints and min(values) in UINT31 and max(values) in UINT31


def _validate_prompts(values: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    if are_counts(values):
        return values
    if isinstance(values, list) and len(values) > MAX_ENTRIES:
        raise ValueError(f"{len(values)} entries; limit: {MAX_ENTRIES}")
    return validate(values)


def _validate_ids(values: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    return values if are_counts(values) else validate(values)


def _check_logit_bias(values: Any) -> Any:
    """An error for each of a million entries would take seconds."""
    if isinstance(values, dict) and len(values) > LIMITS.max_logit_bias:
        raise ValueError(f"too many entries: {len(values)}; limit: {LIMITS.max_logit_bias}")
    return values


LogitBias = Annotated[dict[Count, Number], BeforeValidator(_check_logit_bias)]
TokenIds = Annotated[list[Count], WrapValidator(_validate_ids)]
Prompts = Annotated[
    str | list[str] | list[Count] | list[TokenIds], WrapValidator(_validate_prompts)
]
"""A text, several, a list of token ids, or several of those."""

REFUSED: dict[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "suffix": (None, ""),
    "spaces_between_special_tokens": (None, True),
    "chat_template": (None,),
    "documents": (None, []),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "context_reduction": (None,),
    "web_search_options": (None,),
    "mcp_servers": (None, []),
    "prompt_embeds": (None, []),
    "grammar": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "json_schema": (None,),
    "structural_tag": (None,),
    "guided_whitespace_pattern": (None,),
    "logits_processors": (None, []),
}
"""Field → the values that change nothing and are accepted."""
_INSTEAD = {
    "functions": "send tools",
    "function_call": "send tool_choice",
    "grammar": "send guided_grammar",
    "regex": "send guided_regex",
    "ebnf": "send guided_grammar",
    "json_schema": "send response_format",
}
"""Refused field → what this server takes in its place."""


class OpenBody(RequestModel):
    """A body, or a part of one, that may have further fields."""

    model_config = ConfigDict(extra="allow")


class StreamOptions(OpenBody):
    """`include_usage`: a last chunk with usage. `continuous_usage_stats`: usage in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(OpenBody):
    """`json_schema` of a `response_format`. `strict` changes nothing: every response conforms."""

    name: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(OpenBody):
    """Structured output in OpenAI's form. `schema`: with `json_object`, as llama.cpp and Together
    take it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class StructuredOutputs(OpenBody):
    """Structured output in vLLM's form: one of these."""

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class CacheControlParam(OpenBody):
    """What the prefix cache keeps: "ephemeral" pins the prompt for the time to live (5m), evicted
    last; "no_store" keeps nothing of the request.

    `num_messages`: the pinned part ends after that many messages. `max_tokens`: the most
    tokens that later requests can find.
    """

    type: Literal["ephemeral", "no_store"]
    ttl: Literal["5m", "1h"] | None = None
    num_messages: Count | None = None
    max_tokens: Count | None = None


class CompletionRequestBase(OpenBody):
    """Fields that completions and chat completions share."""

    model: str | None = None
    n: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: LogitBias | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    prompt_logprobs: Integer | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    cache_control: CacheControlParam | None = None
    best_of: Integer | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    allowed_token_ids: TokenIds | None = None
    kv_eviction: dict[str, Any] | None = None
    truncate_prompt_tokens: PromptLength | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: Number | None = None
    early_stopping: bool | Literal["never"] | None = None
    bad_words: list[str] | None = None
    thinking_token_budget: Count | None = None
    request_id: Name | None = None
    slo_class: Name | None = None
    timeout_ms: Annotated[Number, Field(gt=0, le=86_400_000, allow_inf_nan=False)] | None = None


class CompletionRequest(CompletionRequestBase):
    """Body of `POST /v1/completions`."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Integer | None = None


def refusal_as_text(part: Any) -> Any:
    """A refusal among the parts of an assistant's message, as the text that it is."""
    if isinstance(part, dict) and part.get("type") == "refusal" and "refusal" in part:
        rest = {name: value for name, value in part.items() if name != "refusal"}
        return {**rest, "type": "text", "text": part["refusal"]}
    return part


class TextContentPart(OpenBody):
    """A part of a message's content; only text, or a refusal, is supported."""

    type: Literal["text"]
    text: str

    _read_refusal = model_validator(mode="before")(refusal_as_text)


class FunctionName(OpenBody):
    """A function by its name."""

    name: FunctionId


class FunctionCall(FunctionName):
    """A call that the model made; `arguments` is JSON text."""

    arguments: str | None = "{}"


class ChatToolCall(OpenBody):
    """A tool call in an assistant's message."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionDefinition(FunctionName):
    """A function that the model may call; `parameters` is a JSON schema."""

    description: str | None = None
    parameters: dict[str, Any] | None = None


def _check_tool_type(kind: Any) -> Any:
    """Tools that OpenAI's own servers run (web_search, mcp, …), and those of free text (custom)."""
    if isinstance(kind, str) and kind != "function":
        message = "only functions are supported: this server runs no tools itself"
        fix = "fix: offer a function, and run it in the client"
        raise PydanticCustomError("unsupported_tool", f"{message}; {fix}")
    return kind


FunctionType = Annotated[Literal["function"], BeforeValidator(_check_tool_type)]


class ChatTool(OpenBody):
    """A tool that the model may call."""

    type: FunctionType
    function: FunctionDefinition


_REASONING_FIELDS = ("reasoning_content", "reasoning")


class ChatMessage(OpenBody):
    """A message of a conversation. Other fields (`name`) are passed to the chat template.

    An assistant's message may have no content if it has calls, reasoning, or a refusal, which is
    then its content.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextContentPart] | None = None
    refusal: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: Name | None = None

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and self.role == "assistant":
            reasoning = [(self.model_extra or {}).get(name) for name in _REASONING_FIELDS]
            self.content = self.refusal or ("" if any(reasoning) else None)
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant has tool_calls")
        return self


class NamedToolChoice(OpenBody):
    """The function that the model must call."""

    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(OpenBody):
    """The tools that the model may, or must, choose from."""

    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice] = Field(min_length=1)


class AllowedToolChoice(OpenBody):
    """The other tools are treated as if they had not been offered."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class PredictedContent(OpenBody):
    """The text that the response is expected to repeat, mostly: OpenAI's Predicted Outputs."""

    type: Literal["content"]
    content: str | list[TextContentPart]

    @property
    def text(self) -> str:
        """The whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class DocumentParam(OpenBody):
    """A passage that the answer may rest on. Other fields are passed to chat templates that take
    documents."""

    text: str
    title: str | None = None


class ContextReductionParam(RequestModel):
    """Fewer prompt tokens for `documents`. Lossy, but for `deduplicate: exact`.

    `deduplicate`: the first of equal passages stays, or of those whose runs of four words have a
    Jaccard index of at least `similarity`. `order`: "canonical" depends on the texts alone, so that
    requests with the same passages share their prefix. `keep_ratio`: the tokens to keep of each
    passage; the sentences or words that the model predicts with ease go.
    """

    model_config = ConfigDict(extra="forbid")
    deduplicate: Literal["exact", "near"] | None = "exact"
    similarity: Annotated[float, Field(gt=0, le=1)] | None = None
    order: Literal["given", "canonical"] = "given"
    keep_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    keep_unit: Literal["sentence", "word"] | None = None


ChatToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice


class ChatCompletionRequest(CompletionRequestBase):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    echo: Literal[False] | None = None
    tools: list[ChatTool] | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    prediction: PredictedContent | None = None
    documents: list[str | DocumentParam] | None = None
    context_reduction: ContextReductionParam | None = None
    truncation: Literal["auto", "disabled"] | None = None
    parse_special: bool | None = None

    @model_validator(mode="after")
    def _keep_allowed_tools(self) -> ChatCompletionRequest:
        if isinstance(self.tool_choice, AllowedToolChoice):
            allowed = self.tool_choice.allowed_tools
            names = {choice.function.name for choice in allowed.tools}
            tools = [tool for tool in self.tools or () if tool.function.name in names]
            if unknown := names - {tool.function.name for tool in tools}:
                message = f"tool_choice names an unknown tool: {min(unknown)}"
                raise ApiError(400, message, param="tool_choice")
            self.tools, self.tool_choice = tools, allowed.mode
        return self


Body = TypeVar("Body", bound=BaseModel)


def validate_fields(model: type[Body], fields: dict[str, Any]) -> Body:
    """A body translated from another API's. Raises ApiError 400, which names a bad field."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error, fields) from None


def check_supported(body: CompletionRequestBase) -> None:
    """ApiError 400 for fields that would change the response and are not implemented, and for
    combinations that cannot be served."""
    for name, value in (body.model_extra or {}).items():
        if name in REFUSED and value not in REFUSED[name]:
            fix = _INSTEAD.get(name, f"leave {name} out")
            message = f"{name} is not supported by this server; fix: {fix}"
            raise ApiError(400, message, param=name)
    structured = body.structured_outputs
    for name, value in ((structured and structured.model_extra) or {}).items():
        if value not in (None, False):
            message = f"structured_outputs.{name} is not supported; fix: leave it out"
            raise ApiError(400, message, param="structured_outputs")
    if body.best_of is not None and body.best_of != (body.n or 1):
        limit = f"got {body.best_of}; limit: n = {body.n or 1}"
        raise ApiError(400, f"best_of other than n is not supported; {limit}", param="best_of")
    if not body.use_beam_search:
        for name, neutral in (("length_penalty", (None, 1.0)), ("early_stopping", (None, False))):
            if getattr(body, name) not in neutral:
                raise ApiError(400, f"{name} needs use_beam_search = true", param=name)
    elif body.stream:
        message = "use_beam_search is not available with stream = true; fix: do not stream"
        raise ApiError(400, message, param="use_beam_search")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream = true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        message = "prompt_logprobs is not available with stream = true; fix: do not stream"
        raise ApiError(400, message, param="prompt_logprobs")


EXTENSIONS = frozenset((
    "seed", "min_p", "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "min_tokens", "skip_special_tokens", "add_special_tokens", "allowed_token_ids",
    "truncate_prompt_tokens", "response_format", "structured_outputs", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "chat_template_kwargs",
    "include_reasoning", "request_id", "slo_class", "timeout_ms", "best_of", "bad_words",
    "thinking_token_budget", "parse_special",
))  # fmt: skip
"""Fields of a chat that are honoured by the APIs that translate to one, too."""
_WITHOUT_PLACE: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "return_token_ids": (None, False),
    "echo": (None, False),
    "documents": (None, []),
    "context_reduction": (None,),
}
"""Fields of a chat whose results the other APIs' responses cannot hold → values without effect."""


def extension_fields(body: OpenBody) -> dict[str, Any]:
    """The fields of another API's body that are a chat's; those that a chat refuses are among them.

    ApiError 400 for fields whose results the response could not hold.
    """
    extra = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    for name, neutral in _WITHOUT_PLACE.items():
        if extra.get(name) not in neutral:
            message = f"{name} is not supported here; fix: send it to /v1/chat/completions"
            raise ApiError(400, message, param=name)
    return {name: extra[name] for name in extra if name in EXTENSIONS or name in REFUSED}


def dropped_fields(body: OpenBody, *, prefix: str = "") -> set[str]:
    """Names of the fields, at any depth, that a translation to a chat leaves out."""
    dropped: set[str] = set()
    for name, value in (body.model_extra or {}).items():
        is_served = not prefix and (name in EXTENSIONS or name in REFUSED)
        if value is not None and not is_served:
            dropped.add(prefix + name)
    for name in type(body).model_fields.keys() & body.model_fields_set:
        value = getattr(body, name)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, OpenBody):
                dropped |= dropped_fields(part, prefix=f"{prefix}{name.rstrip('_')}.")
    return dropped


_NESTED = {"cache_control", "stream_options", "response_format", "structured_outputs"}


def ignored_fields(body: CompletionRequestBase) -> tuple[str, ...]:
    """Names of the fields that were sent and have no effect."""
    ignored = [name for name in body.model_extra or () if name not in REFUSED]
    for part in _NESTED & body.model_fields_set:
        nested = getattr(body, part)
        ignored += [f"{part}.{name}" for name in (nested and nested.model_extra) or ()]
    return tuple(sorted(ignored))
