"""Request body of the Responses API, and its translation to a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ridgeline.serve.errors import ApiError
from ridgeline.serve.openai.schemas import (
    CacheSalt,
    ChatCompletionRequest,
    FunctionId,
    FunctionType,
    Integer,
    Name,
    Number,
    OpenBody,
    Priority,
    ReasoningEffort,
    extension_fields,
    refusal_as_text,
    validate_fields,
)


class InputText(OpenBody):
    """A part of a message; only text, or a refusal, is supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str

    _read_refusal = model_validator(mode="before")(refusal_as_text)


class InputMessage(OpenBody):
    """A message of the conversation."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText]


class InputFunctionCall(OpenBody):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: Name
    name: FunctionId
    arguments: str


class InputFunctionOutput(OpenBody):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: str | list[InputText]


class InputReasoning(OpenBody):
    """Reasoning of an earlier response; it is not sent to the model again."""

    type: Literal["reasoning"]


InputItem = InputMessage | InputFunctionCall | InputFunctionOutput | InputReasoning


class ResponseTool(OpenBody):
    """A function; other kinds of tools are not supported."""

    type: FunctionType
    name: FunctionId
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(OpenBody):
    """The function that the model must call."""

    type: Literal["function"]
    name: FunctionId


class ResponseAllowedTools(OpenBody):
    """The tools that the model may, or must, choose from."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ResponseToolChoice] = Field(min_length=1)


class ResponseTextFormat(OpenBody):
    """Structured output."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseTextOptions(OpenBody):
    """Options of the text."""

    format: ResponseTextFormat | None = None


class ResponseReasoningOptions(OpenBody):
    """Options of the reasoning."""

    effort: ReasoningEffort | None = None


_STATELESS = {
    "previous_response_id": "send the whole conversation as input",
    "conversation": "send the whole conversation as input",
    "prompt": "send the text as instructions and input",
    "background": "wait for the response, or stream it",
}
"""Fields that need stored responses → what to send instead."""


class ResponsesRequest(OpenBody):
    """Body of `POST /v1/responses`. Nothing is stored: `store` is answered with false."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[Integer, Field(ge=1, lt=2**31)] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stream: bool | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | ResponseToolChoice | ResponseAllowedTools | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: ResponseTextOptions | None = None
    reasoning: ResponseReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None

    @field_validator(*_STATELESS)
    @classmethod
    def _check_stateless(cls, value: Any, info: ValidationInfo) -> Any:
        if value in (None, False):
            return value
        fix = _STATELESS[info.field_name or ""]
        message = f"not supported: this server stores nothing; fix: {fix}"
        raise PydanticCustomError("stateless", message)


def to_chat(body: ResponsesRequest) -> ChatCompletionRequest:
    """The same request as a chat; ApiError 400 if a chat cannot express it."""
    chat: dict[str, Any] = {
        **extension_fields(body),
        "model": body.model,
        "messages": _messages(body),
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "parallel_tool_calls": body.parallel_tool_calls,
        "priority": body.priority,
        "cache_salt": body.cache_salt,
        "truncation": body.truncation,
        "reasoning_effort": body.reasoning and body.reasoning.effort,
        "tool_choice": body.tool_choice,
    }
    text_format = _response_format(body.text.format if body.text else None)
    if text_format is not None:
        chat["response_format"] = text_format
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
    if isinstance(body.tool_choice, ResponseToolChoice):
        chat["tool_choice"] = _named(body.tool_choice)
    elif isinstance(body.tool_choice, ResponseAllowedTools):
        names = [_named(tool) for tool in body.tool_choice.tools]
        allowed = {"mode": body.tool_choice.mode, "tools": names}
        chat["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    given = {name: value for name, value in chat.items() if value is not None}
    return validate_fields(ChatCompletionRequest, given)


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in body.input:
        if isinstance(item, InputMessage):
            messages.append({"role": item.role, "content": _text(item.content)})
        elif isinstance(item, InputFunctionOutput):
            output = _text(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        elif isinstance(item, InputFunctionCall):
            _add_call(messages, item)
    if not messages:
        raise ApiError(400, "input has no message", param="input")
    return messages


def _add_call(messages: list[dict[str, Any]], item: InputFunctionCall) -> None:
    """Consecutive calls are one message of the assistant."""
    function = {"name": item.name, "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _named(choice: ResponseToolChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def _tool(tool: ResponseTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given}


def _response_format(requested: ResponseTextFormat | None) -> dict[str, Any] | None:
    if requested is None or requested.type != "json_schema":
        return None if requested is None else {"type": requested.type}
    if requested.schema_ is None:
        raise ApiError(400, "text.format.schema is missing", param="text")
    return {"type": "json_schema", "json_schema": {"schema": requested.schema_}}
