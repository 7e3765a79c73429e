"""Bodies of Anthropic's Messages, and what they say in the words of a chat."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ridgeline.serve.errors import ApiError
from ridgeline.serve.openai.schemas import ChatRequest, Count, Name, Priority, validated

MAX_BREAKPOINTS = 4  # Anthropic's own limit on cache_control marks


class CacheControl(BaseModel):
    """A mark where a cached prefix may end. Ours ends at every block: marks change nothing."""

    model_config = ConfigDict(extra="allow")
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Marked(BaseModel):
    model_config = ConfigDict(extra="allow")
    cache_control: CacheControl | None = None


class TextBlock(_Marked):
    """Text."""

    type: Literal["text"]
    text: str


class ToolUse(_Marked):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


class ToolResult(_Marked):
    """What a call brought."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class Thinking(_Marked):
    """What the assistant thought in an earlier turn: not sent to the model again."""

    type: Literal["thinking", "redacted_thinking"]


InBlock = Annotated[TextBlock | ToolUse | ToolResult | Thinking, Field(discriminator="type")]


class Turn(BaseModel):
    """One message."""

    model_config = ConfigDict(extra="allow")
    role: Literal["user", "assistant"]
    content: str | list[InBlock]


class MessageTool(_Marked):
    """A tool of the caller's."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]


class MessageToolChoice(BaseModel):
    """Whether and which."""

    model_config = ConfigDict(extra="allow")
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingWish(BaseModel):
    """Whether the model may think first. `budget_tokens` is not a limit here."""

    model_config = ConfigDict(extra="allow")
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


class CountRequest(BaseModel):
    """Body of `POST /v1/messages/count_tokens`."""

    model_config = ConfigDict(extra="allow")
    model: str
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingWish | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    priority: Priority | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None


def as_chat(asked: CountRequest) -> ChatRequest:
    """The same conversation as a chat; ApiError 400 where it cannot be said."""
    _check_breakpoints(asked)
    chat: dict[str, Any] = {"messages": _messages(asked)}
    if asked.tools:
        chat["tools"] = [_tool(tool) for tool in asked.tools]
        chat |= _choice(asked.tool_choice)
    if asked.thinking is not None:
        chat["chat_template_kwargs"] = {"enable_thinking": asked.thinking.type != "disabled"}
    if isinstance(asked, MessagesRequest):
        chat |= _sampling(asked)
    return validated(ChatRequest, {name: v for name, v in chat.items() if v is not None})


def _sampling(asked: MessagesRequest) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "top_k", "priority", "cache_salt")
    return {name: getattr(asked, name) for name in names} | {"stop": asked.stop_sequences}


def _messages(asked: CountRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if asked.system:
        messages.append({"role": "system", "content": _text(asked.system)})
    for turn in asked.messages:
        messages += _turn(turn)
    return messages


def _turn(turn: Turn) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before the text that came with them."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results = [block for block in turn.content if isinstance(block, ToolResult)]
    calls = [block for block in turn.content if isinstance(block, ToolUse)]
    texts = [block for block in turn.content if isinstance(block, TextBlock)]
    if (results and turn.role == "assistant") or (calls and turn.role == "user"):
        message = "tool_use belongs to the assistant, tool_result to the user"
        raise ApiError(400, message, param="messages")
    said = [_result(block) for block in results]
    if texts or calls or not results:
        own: dict[str, Any] = {"role": turn.role}
        own["content"] = "\n".join(block.text for block in texts)
        said.append(own | ({"tool_calls": [_call(call) for call in calls]} if calls else {}))
    return said


def _result(block: ToolResult) -> dict[str, Any]:
    text = _text(block.content or "")
    text = f"error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _call(block: ToolUse) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _tool(tool: MessageTool) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(choice: MessageToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    said: dict[str, Any] = {}
    if choice.disable_parallel_tool_use:
        said["parallel_tool_calls"] = False
    if choice.type == "tool":
        return said | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return said | {"tool_choice": "required" if choice.type == "any" else choice.type}


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _check_breakpoints(asked: CountRequest) -> None:
    marked: list[Any] = [asked, *(asked.tools or ())]
    marked += asked.system if isinstance(asked.system, list) else []
    for turn in asked.messages:
        marked += turn.content if isinstance(turn.content, list) else []
    number = sum(getattr(each, "cache_control", None) is not None for each in marked)
    if number > MAX_BREAKPOINTS:
        message = f"too many cache_control marks: {number}; limit: {MAX_BREAKPOINTS}"
        raise ApiError(400, message, param="cache_control")
