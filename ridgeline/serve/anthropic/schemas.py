"""Bodies of Anthropic's Messages API, and the translation of a request to a chat."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from ridgeline.serve.errors import ApiError
from ridgeline.serve.openai.objects import NonNegative
from ridgeline.serve.openai.schemas import (
    CacheSalt,
    ChatCompletionRequest,
    Count,
    FunctionId,
    Integer,
    Name,
    Number,
    OpenBody,
    Priority,
    dropped_fields,
    extension_fields,
    validate_fields,
)

_BILLING = "x-anthropic-billing-header:"
MAX_CACHE_BREAKPOINTS = 4
"""Anthropic's limit on `cache_control` marks."""


class CacheControl(OpenBody):
    """A mark up to which the prefix is pinned: evicted last, until its time to live is over."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class CacheableBody(OpenBody):
    """A part of a request that may carry a mark."""

    cache_control: CacheControl | None = None


class InputTextBlock(CacheableBody):
    """Text."""

    type: Literal["text"]
    text: str


class InputToolUseBlock(CacheableBody):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: Name
    name: FunctionId
    input: dict[str, Any]


class InputToolResultBlock(CacheableBody):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | list[InputTextBlock] | None = None
    is_error: bool | None = None


class InputThinkingBlock(CacheableBody):
    """Reasoning of an earlier response; it is not sent to the model again."""

    type: Literal["thinking", "redacted_thinking"]


InputBlock = Annotated[
    InputTextBlock | InputToolUseBlock | InputToolResultBlock | InputThinkingBlock,
    Field(discriminator="type"),
]


class MessageParam(OpenBody):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


def _check_tool_type(kind: Any) -> Any:
    """Tools that Anthropic's servers run (web_search_20250305), or whose schema only they know
    (bash_20250124)."""
    if isinstance(kind, str) and kind != "custom":
        message = "only tools with an input_schema are supported: this server runs no tools itself"
        fix = "fix: describe the tool with an input_schema, and run it in the client"
        raise PydanticCustomError("unsupported_tool", f"{message}; {fix}")
    return kind


class MessageTool(CacheableBody):
    """A tool that the model may call."""

    type: Annotated[Literal["custom"] | None, BeforeValidator(_check_tool_type)] = None
    name: FunctionId
    description: str | None = None
    input_schema: dict[str, Any]


class MessageToolChoice(OpenBody):
    """Whether the model must call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionId | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(OpenBody):
    """Whether the model may reason first, and its budget where the server knows the marks."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


class JsonOutputFormat(OpenBody):
    """Structured output."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] | bool = Field(alias="schema")


class OutputConfig(OpenBody):
    """Structured output, and the effort, which the chat template gets as `reasoning_effort`."""

    format: JsonOutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(OpenBody):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: str | list[InputTextBlock] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountTokensRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[Integer, Field(ge=1, lt=2**31)]
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None


class TokenCount(TypedDict):
    """Tokens of a conversation."""

    input_tokens: NonNegative


class MessageUsage(TypedDict):
    """Tokens. Those of the input that were cached, and those that are pinned up to a
    `cache_control` mark from now on, are counted separately from the rest."""

    input_tokens: NonNegative
    cache_creation_input_tokens: NonNegative
    cache_read_input_tokens: NonNegative
    output_tokens: NonNegative


class TextBlock(TypedDict):
    """Text of a response."""

    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    """Reasoning of a response."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    """A tool call of a response."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ResponseBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "abort"]


class MessageResponse(TypedDict):
    """A response. `stop_reason` is null while it is streamed."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ResponseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEventError(TypedDict):
    """Why a stream broke."""

    type: str
    message: str


class MessageEvent(TypedDict):
    """One event of a stream."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    index: NotRequired[NonNegative]
    content_block: NotRequired[ResponseBlock]
    delta: NotRequired[dict[str, Any]]
    usage: NotRequired[MessageUsage]
    message: NotRequired[MessageResponse]
    error: NotRequired[MessageEventError]


def to_chat(body: CountTokensRequest) -> ChatCompletionRequest:
    """The same request as a chat; ApiError 400 if a chat cannot express it."""
    control = _cache_control(body)
    chat: dict[str, Any] = {
        **extension_fields(body),
        "model": body.model,
        "messages": _messages(body),
    }
    last = chat["messages"][-1]
    if last["role"] == "assistant" and "tool_calls" not in last:
        chat["continue_final_message"] = True  # a prefill, which the response goes on from
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
    chat |= _tool_choice(body.tool_choice) | _response_format(body)
    if control is not None:
        chat["cache_control"] = control
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    if variables:
        chat["chat_template_kwargs"] = variables | (chat.get("chat_template_kwargs") or {})
    if isinstance(body, MessagesRequest):
        names = ("max_tokens", "temperature", "top_p", "top_k", "priority", "cache_salt")
        chat |= {name: getattr(body, name) for name in names}
        if body.stop_sequences is not None:
            chat["stop"] = body.stop_sequences
    given = {name: value for name, value in chat.items() if value is not None}
    return validate_fields(ChatCompletionRequest, given)


def ignored_fields(body: CountTokensRequest) -> list[str]:
    """Names of the fields that have no effect."""
    return sorted(dropped_fields(body))


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    """System messages that open the conversation are one: many templates take only the first."""
    messages: list[dict[str, Any]] = []
    if system := _without_billing(body.system or ""):
        messages.append({"role": "system", "content": system})
    for message in body.messages:
        if message.role == "system":
            _check_text_only(message)
            text = _without_billing(message.content)  # type: ignore[arg-type]  # text only
            if text and len(messages) == 1 and messages[0]["role"] == "system":
                messages[0]["content"] += "\n" + text
            elif text:
                messages.append({"role": "system", "content": text})
        else:
            messages += _chat_messages(message)
    if not messages:
        raise ApiError(400, "messages has no text", param="messages")
    return messages


def _without_billing(system: str | list[InputTextBlock]) -> str:
    """The text without the line that Claude Code puts first.

    It differs in every request, so that no cached prefix would ever be found again.
    """
    blocks = [system] if isinstance(system, str) else [block.text for block in system]
    kept = []
    for text in blocks:
        if text.startswith(_BILLING):
            text = text.partition("\n")[2]
        kept += [text] if text else []
    return "\n".join(kept)


def _check_text_only(message: MessageParam) -> None:
    blocks = message.content if isinstance(message.content, list) else []
    if not all(isinstance(block, InputTextBlock) for block in blocks):
        raise ApiError(400, "messages: a system message has text only", param="messages")


def _response_format(body: CountTokensRequest) -> dict[str, Any]:
    config = body.output_config.format if body.output_config else None
    if config is not None and body.output_format is not None:
        message = "output_format is the older name of output_config.format; fix: send one of them"
        raise ApiError(400, message, param="output_format")
    requested = config or body.output_format
    if requested is None:
        return {}
    schema = {"name": "output", "schema": requested.schema_}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _chat_messages(message: MessageParam) -> list[dict[str, Any]]:
    """Tool results are separate messages, before the text that came with them."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results = [block for block in message.content if isinstance(block, InputToolResultBlock)]
    calls = [block for block in message.content if isinstance(block, InputToolUseBlock)]
    texts = [block for block in message.content if isinstance(block, InputTextBlock)]
    if (results and message.role == "assistant") or (calls and message.role == "user"):
        error = "tool_use belongs to the assistant, tool_result to the user"
        raise ApiError(400, error, param="messages")
    converted = [_tool_result(block) for block in results]
    if texts or calls or not results:
        content = "\n".join(block.text for block in texts)
        rest: dict[str, Any] = {"role": message.role, "content": content}
        if calls:
            rest["tool_calls"] = [_tool_call(call) for call in calls]
        converted.append(rest)
    return converted


def _tool_result(block: InputToolResultBlock) -> dict[str, Any]:
    text = _text(block.content or "")
    text = f"error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _tool_call(block: InputToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _tool(tool: MessageTool) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _tool_choice(choice: MessageToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    fields: dict[str, Any] = {}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(400, "tool_choice.name is missing", param="tool_choice.name")
        return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return fields | {"tool_choice": "required" if choice.type == "any" else choice.type}


def _text(content: str | list[InputTextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _cache_control(body: CountTokensRequest) -> dict[str, Any] | None:
    """The marks as a chat's `cache_control`: the last one's place, the longest time to live.

    A mark in a message counts for the whole message, one in a tool for the message after the tools.
    """
    marks = [(1, tool.cache_control) for tool in body.tools or ()]
    marks += [(1, block.cache_control) for block in _blocks(body.system)]
    for i, message in enumerate(body.messages, start=1):
        for block in _blocks(message.content):
            if block.cache_control is not None:
                up_to = body.model_copy(update={"messages": body.messages[:i]})
                marks.append((len(_messages(up_to)), block.cache_control))
    given = [(place, mark) for place, mark in marks if mark is not None]
    number = len(given) + (body.cache_control is not None)
    if number > MAX_CACHE_BREAKPOINTS:
        error = f"too many cache_control marks: {number}; limit: {MAX_CACHE_BREAKPOINTS}"
        raise ApiError(400, error, param="cache_control")
    if not number:
        return None
    own = [mark for _, mark in given] + [mark for mark in [body.cache_control] if mark is not None]
    ttl = "1h" if any(mark.ttl == "1h" for mark in own) else "5m"
    control: dict[str, Any] = {"type": "ephemeral", "ttl": ttl}
    if body.cache_control is None:  # otherwise everything is pinned
        control["num_messages"] = max(place for place, _ in given)
    return control


def _blocks(content: Any) -> list[Any]:
    """Content blocks; none of a plain text."""
    return content if isinstance(content, list) else []
