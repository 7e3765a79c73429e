"""Response bodies of OpenAI's API, as the types that routes build and the document describes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from ridgeline.records import Usage
from ridgeline.serve.output_parsers.choice_parser import ChoiceFinishReason

NonNegative = Annotated[int, Field(ge=0)]
Logprob = Annotated[float, Field(le=0)]


class PromptTokensDetails(TypedDict):
    """`cached_tokens`: the part of the prompt that came from the prefix cache."""

    cached_tokens: NonNegative


class CompletionTokensDetails(TypedDict):
    """Of a request with a prediction: its tokens that were accepted, and drafted in vain."""

    accepted_prediction_tokens: NonNegative
    rejected_prediction_tokens: NonNegative


class CompletionUsage(TypedDict):
    """Tokens over all prompts and choices; a prompt counts once whatever n is."""

    prompt_tokens: NonNegative
    completion_tokens: NonNegative
    total_tokens: NonNegative
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class RequestTimings(TypedDict):
    """vLLM's `metrics`: milliseconds, and tokens per second without the queue."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None


class CompletionLogprobs(TypedDict):
    """One entry per token; null for the first token of a prompt, which nothing predicts."""

    tokens: list[str]
    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None]
    text_offset: list[NonNegative]


class TopLogprob(TypedDict):
    """One candidate at a position."""

    token: str
    logprob: Logprob
    bytes: list[NonNegative]


class ChatTokenLogprob(TopLogprob):
    """The chosen token at a position, and the candidates."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """One entry per token."""

    content: list[ChatTokenLogprob]
    refusal: None


class PromptLogprob(TypedDict):
    """One candidate at a position of a prompt."""

    logprob: Logprob
    rank: NonNegative
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per prompt token, candidates by token id; null for the first."""


class CompletionChoice(TypedDict):
    """One choice of a completion."""

    index: NonNegative
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: ChoiceFinishReason | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[NonNegative]]
    prompt_token_ids: NotRequired[list[NonNegative]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class CompletionResponse(TypedDict):
    """A completion."""

    id: str
    object: Literal["text_completion"]
    created: NonNegative
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage
    metrics: NotRequired[RequestTimings]


class CompletionChunk(TypedDict):
    """One event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: NonNegative
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[CompletionUsage]
    metrics: NotRequired[RequestTimings]


class FunctionCallObject(TypedDict):
    """The called function; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallObject(TypedDict):
    """A tool call of a response. `index` counts the calls of a stream."""

    id: str
    type: Literal["function"]
    function: FunctionCallObject
    index: NotRequired[NonNegative]


class ResponseMessage(TypedDict):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallObject]]


class ChatChoice(TypedDict):
    """One choice of a chat completion."""

    index: NonNegative
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChoiceFinishReason | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[NonNegative]]


class ChatCompletionResponse(TypedDict):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: NonNegative
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    metrics: NotRequired[RequestTimings]
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[NonNegative]]


class ChatDelta(TypedDict, total=False):
    """What a chunk adds to the message."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[ToolCallObject]


class ChatChunkChoice(TypedDict):
    """One choice of a chunk."""

    index: NonNegative
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChoiceFinishReason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[NonNegative]]


class ChatCompletionChunk(TypedDict):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: NonNegative
    model: str
    choices: list[ChatChunkChoice]
    prompt_token_ids: NotRequired[list[NonNegative]]
    usage: NotRequired[CompletionUsage]
    metrics: NotRequired[RequestTimings]


class ModelCard(TypedDict):
    """A served model; `parent`: the base model of an adapter."""

    id: str
    object: Literal["model"]
    created: NonNegative
    owned_by: str
    root: str
    parent: str | None
    max_model_len: NonNegative


class ModelList(TypedDict):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]


class AnthropicModel(TypedDict):
    """A served model in Anthropic's shape. `max_input_tokens` bounds prompt and output together."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: NonNegative


class AnthropicModelList(TypedDict):
    """All served models, as one page."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str
    last_id: str


class EmbeddingObject(TypedDict):
    """Numbers, or little-endian float32 in base64."""

    object: Literal["embedding"]
    index: NonNegative
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Tokens of all inputs."""

    prompt_tokens: NonNegative
    total_tokens: NonNegative


class EmbeddingResponse(TypedDict):
    """One embedding per input."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


class InputTokensDetails(TypedDict):
    """`cached_tokens`: the part of the input that came from the prefix cache."""

    cached_tokens: NonNegative


class OutputTokensDetails(TypedDict):
    """`reasoning_tokens`: the part of the output that is reasoning."""

    reasoning_tokens: NonNegative


class ResponseUsage(TypedDict):
    """Tokens as the Responses API and the Batch API report them."""

    input_tokens: NonNegative
    input_tokens_details: InputTokensDetails
    output_tokens: NonNegative
    output_tokens_details: OutputTokensDetails
    total_tokens: NonNegative


class IncompleteDetails(TypedDict):
    """Why a response was cut off."""

    reason: Literal["max_output_tokens", "abort"]


class ResponseTextPart(TypedDict):
    """A part of a message or of reasoning."""

    type: str
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[Any]]


class ResponseItem(TypedDict):
    """A message, a function call, or reasoning."""

    type: Literal["message", "function_call", "reasoning"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[ResponseTextPart]]
    summary: NotRequired[list[Any]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]


class InputTokenCount(TypedDict):
    """How many tokens the input of a response has."""

    object: Literal["response.input_tokens"]
    input_tokens: NonNegative


class ResponseObject(TypedDict):
    """A response of the Responses API. Nothing is stored."""

    id: str
    object: Literal["response"]
    created_at: NonNegative
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: NonNegative | None
    model: str
    output: list[ResponseItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    metadata: dict[str, str]


class ResponseEvent(TypedDict):
    """One event of OpenAI's Responses API, or `error`, which ends a stream."""

    type: Annotated[str, Field(pattern=r"^(response\.[a-z_.]+|error)$")]


def completion_usage(usage: Usage) -> CompletionUsage:
    counts: CompletionUsage = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    accepted, rejected = usage.accepted_prediction_tokens, usage.rejected_prediction_tokens
    if accepted is not None and rejected is not None:
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        }
    return counts


def response_usage(usage: Usage, num_reasoning_tokens: int = 0) -> ResponseUsage:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
