"""Bodies of OpenAI's Responses, and what they say in the words of a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ridgeline.serve.errors import ApiError
from ridgeline.serve.openai.schemas import ChatRequest, Name, Priority, validated


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class TextContent(_Open):
    """A piece of a message; the server reads text only."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class MessageItem(_Open):
    """One turn."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextContent]


class CallItem(_Open):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str


class CallOutputItem(_Open):
    """What a call brought."""

    type: Literal["function_call_output"]
    call_id: Name
    output: str | list[TextContent]


class ReasoningItem(_Open):
    """What the model thought in an earlier turn: not sent to it again."""

    type: Literal["reasoning"]


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem


class ResponseTool(_Open):
    """A function; other kinds of tools are not served."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(_Open):
    """The function that is insisted on."""

    type: Literal["function"]
    name: Name


class TextFormat(_Open):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextWish(_Open):
    """How the text is wanted."""

    format: TextFormat | None = None


class ReasoningWish(_Open):
    """How much thought."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponsesRequest(_Open):
    """Body of `POST /v1/responses`. Nothing is stored: `store` is answered with false."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextWish | None = None
    reasoning: ReasoningWish | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    priority: Priority | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None


def as_chat(asked: ResponsesRequest) -> ChatRequest:
    """The same conversation as a chat; ApiError 400 where it cannot be said."""
    chat: dict[str, Any] = {
        "messages": _messages(asked),
        "max_tokens": asked.max_output_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "parallel_tool_calls": asked.parallel_tool_calls,
        "priority": asked.priority,
        "cache_salt": asked.cache_salt,
        "response_format": _format(asked.text.format if asked.text else None),
        "reasoning_effort": asked.reasoning and asked.reasoning.effort,
    }
    if asked.tools:
        chat["tools"] = [_tool(tool) for tool in asked.tools]
    choice = asked.tool_choice
    if isinstance(choice, ResponseToolChoice):
        choice_said: Any = {"type": "function", "function": {"name": choice.name}}
    else:
        choice_said = choice
    chat["tool_choice"] = choice_said
    return validated(ChatRequest, {name: v for name, v in chat.items() if v is not None})


def ignored_fields(asked: ResponsesRequest) -> tuple[str, ...]:
    """Names of the fields that were sent, accepted and not looked at."""
    return tuple(sorted(asked.model_extra or {}))


def _messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    if asked.instructions:
        said.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*said, {"role": "user", "content": asked.input}]
    for item in asked.input:
        if isinstance(item, MessageItem):
            said.append({"role": item.role, "content": _text(item.content)})
        elif isinstance(item, CallOutputItem):
            text = _text(item.output)
            said.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        elif isinstance(item, CallItem):
            _add_call(said, item)
    if not said:
        raise ApiError(400, "input holds no message", param="input")
    return said


def _add_call(said: list[dict[str, Any]], item: CallItem) -> None:
    """Calls that follow each other are one message of the assistant's."""
    function = {"name": item.name, "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    if said and said[-1]["role"] == "assistant":
        said[-1].setdefault("tool_calls", []).append(call)
    else:
        said.append({"role": "assistant", "content": "", "tool_calls": [call]})


def _text(content: str | list[TextContent]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _tool(tool: ResponseTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    kept = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": kept}


def _format(wish: TextFormat | None) -> dict[str, Any] | None:
    if wish is None or wish.type != "json_schema":
        return None if wish is None else {"type": wish.type}
    if wish.schema_ is None:
        raise ApiError(400, "text.format.schema is missing", param="text")
    return {"type": "json_schema", "json_schema": {"schema": wish.schema_}}
