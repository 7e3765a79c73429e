"""From a request body to what the engine takes: sampling parameters, and prompts as token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ridgeline.errors import BadInput
from ridgeline.records import (
    BeamSearch,
    KvEviction,
    OutputGrammar,
    Sampling,
    SamplingDefaults,
    ThinkingMarks,
)
from ridgeline.records.request import MAX_LOGPROBS
from ridgeline.serve.config import LIMITS
from ridgeline.serve.engine_protocol import ServedTokenizer
from ridgeline.serve.errors import ApiError, check_limit
from ridgeline.serve.generation.prompt_reader import PromptReader
from ridgeline.serve.generation.request import RequestOptions, TokenPrompt
from ridgeline.serve.openai.schemas import (
    ChatCompletionRequest,
    ChatMessage,
    ChatToolCall,
    CompletionRequest,
    CompletionRequestBase,
    ignored_fields,
)
from ridgeline.serve.openai.structured_output import grammar_field, requested_grammar
from ridgeline.serve.output_parsers.composed import after_thinking, answer_or_calls
from ridgeline.serve.output_parsers.reasoning import (
    begins_in_reasoning,
    is_reasoning_closed,
    is_reasoning_open,
)
from ridgeline.serve.output_parsers.select import OutputFormat, check_grammar_size
from ridgeline.serve.output_parsers.tool_schemas import OfferedTool

NO_DEFAULTS = SamplingDefaults()
_TAIL_TOKENS = 64  # the end of a prompt that shows whether the template opened the reasoning

_SAME_NAME = {
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "seed", "include_stop_str_in_output", "ignore_eos",
    "min_tokens", "prompt_logprobs", "skip_special_tokens", "thinking_token_budget",
}  # fmt: skip


def completion_sampling(
    body: CompletionRequest,
    defaults: SamplingDefaults = NO_DEFAULTS,
    marks: ThinkingMarks | None = None,
) -> Sampling:
    """Sampling parameters of a completion; `max_tokens` is 16 by default.

    `defaults` stand for what the body leaves out. `marks`: how the model marks its thinking.

    `echo` with `max_tokens` 0 scores a prompt: one token is sampled, because the logits of the
    prompt come with it, and left out of the response.
    """
    params = _shared_params(body, marks)
    params["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        params["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    max_tokens = _max_tokens(body)
    if max_tokens is not None:
        params["max_tokens"] = 1 if is_score_only(body) else max_tokens
    return defaults.fill(**params)


def _scoring_field(body: CompletionRequestBase) -> str:
    """What asks for log-probabilities of the prompt; `echo` returns them as `logprobs`."""
    if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
        return "logprobs" if body.logprobs >= (body.prompt_logprobs or 0) else "prompt_logprobs"
    return "prompt_logprobs"


def is_score_only(body: CompletionRequest) -> bool:
    """Whether the client wants its prompt back with log-probabilities, and no new token."""
    return bool(body.echo) and _max_tokens(body) == 0


def chat_sampling(
    body: ChatCompletionRequest,
    output_format: OutputFormat,
    tokenizer: ServedTokenizer,
    defaults: SamplingDefaults = NO_DEFAULTS,
) -> Sampling:
    """Sampling parameters of a chat; without a limit it may fill the context.

    `defaults` stand for what the body leaves out. A grammar of calls that `output_format` requires
    comes before a response format, which is about text, and it disables stop strings, which would
    cut the JSON of a call. Where the model may call tools, the response format applies to an answer
    without calls.
    """
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs = true", param="top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        message = (
            f"top_logprobs is out of range; got {body.top_logprobs}; limit: [0, {MAX_LOGPROBS}]"
        )
        raise ApiError(400, message, param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = _shared_params(body, output_format.thinking_marks)
    if output_format.grammar is not None:
        params["structured"] = output_format.grammar
        params.pop("stop", None)
    elif output_format.call_format is not None and "structured" in params:
        grammar = answer_or_calls(
            params["structured"],
            output_format.call_format,
            offered_tools(body),
            tokenizer,
            max_calls=output_format.max_calls,
        )
        check_grammar_size("tools with a response format", grammar)
        params["structured"] = grammar
    if body.skip_special_tokens is not False:
        params["shown_special_tokens"] = output_format.marks
    max_tokens = _max_tokens(body)
    if max_tokens is None:
        max_tokens = defaults.max_tokens
    return defaults.fill(**params, logprobs=logprobs, max_tokens=max_tokens)


def request_options(
    body: CompletionRequestBase, without_effect: Sequence[str] = ()
) -> RequestOptions:
    """Options of a body of the completions family. `without_effect`: fields that have none in
    combination with others."""
    return RequestOptions(
        priority=body.priority,
        cache_salt=body.cache_salt,
        slo_class=body.slo_class,
        timeout_ms=body.timeout_ms,
        request_id=body.request_id,
        scoring_field=_scoring_field(body),
        model=body.model,
        grammar_field=grammar_field(body),
        ignored=(*ignored_fields(body), *without_effect),
    )


async def completion_prompts(body: CompletionRequest, reader: PromptReader) -> list[TokenPrompt]:
    """Every prompt of a completion."""
    add_special_tokens = body.add_special_tokens is not False
    entries = prompt_entries(body.prompt) or [""]
    check_limit("prompt", len(entries), LIMITS.max_prompts, "prompts")
    num_choices = len(entries) * (body.n or 1)
    check_limit("prompt", num_choices, LIMITS.max_choices, "choices (prompts x n)")
    is_cut = body.truncate_prompt_tokens is not None
    prompts = [
        await to_prompt(entry, reader, add_special_tokens, is_cut=is_cut) for entry in entries
    ]
    return [truncate(prompt, body.truncate_prompt_tokens) for prompt in prompts]


async def chat_prompt(
    body: ChatCompletionRequest, reader: PromptReader, *, is_cut: bool = False
) -> TokenPrompt:
    """The conversation, rendered by the model's chat template. `is_cut`: it may be longer than the
    context."""
    check_limit("messages", len(body.messages), LIMITS.max_messages, "messages")
    if body.continue_final_message and body.add_generation_prompt:
        message = "continue_final_message excludes add_generation_prompt"
        raise ApiError(400, message, param="continue_final_message")
    body = _with_documents_as_text(body, reader)
    messages = [_template_message(message) for message in body.messages]
    continues = bool(body.continue_final_message)
    tools = None
    if body.tools and body.tool_choice != "none":
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    variables = _template_variables(body)
    prompt = await reader.render(
        sum(map(_num_chars, body.messages)) + sum(map(len, document_texts(body))),
        is_cut=is_cut or body.truncate_prompt_tokens is not None,
        messages=messages,
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        tools=tools,
        variables=variables,
        continue_final_message=continues,
        add_special_tokens=bool(body.add_special_tokens),
        parse_special=body.parse_special is not False,
    )
    return truncate(prompt, body.truncate_prompt_tokens)


def starts_in_reasoning(
    body: ChatCompletionRequest,
    prompt: TokenPrompt,
    tokenizer: ServedTokenizer,
    *,
    default: bool,
) -> bool:
    """Whether the answer to a rendered conversation begins inside its reasoning.

    `default`: where neither the prompt nor the request's template variables say so.
    """
    if body.continue_final_message:
        is_open = is_reasoning_open(_text_of(body.messages[-1]))
        if is_open is not None:
            return is_open
        default = False  # an answer without marks is being continued
    return begins_in_reasoning(_tail(prompt, tokenizer), default and not _is_thinking_off(body))


def with_thinking(
    grammar: OutputGrammar,
    body: ChatCompletionRequest,
    prompt: TokenPrompt,
    tokenizer: ServedTokenizer,
) -> tuple[OutputGrammar, bool]:
    """A grammar that lets the model think first, and whether the prompt has opened its thinking.

    `grammar` itself where the request turns thinking off or the prompt has closed it, and for Lark
    grammars.
    """
    is_open = starts_in_reasoning(body, prompt, tokenizer, default=False)
    if not is_open:
        is_continued = bool(body.continue_final_message)
        if is_continued or _is_thinking_off(body) or is_reasoning_closed(_tail(prompt, tokenizer)):
            return grammar, False
    wider = after_thinking(grammar, tokenizer, is_open=is_open)
    return (grammar, False) if wider is None else (wider, is_open)


def _is_thinking_off(body: ChatCompletionRequest) -> bool:
    variables = _template_variables(body)
    return False in (variables.get("enable_thinking"), variables.get("thinking"))


def _tail(prompt: TokenPrompt, tokenizer: ServedTokenizer) -> str:
    """The end of a prompt, special tokens included."""
    return tokenizer.decode(prompt.tokens[-_TAIL_TOKENS:], skip_special_tokens=False)


def offered_tools(body: ChatCompletionRequest) -> list[OfferedTool]:
    """The tools of a chat."""
    return [OfferedTool(tool.function.name, tool.function.parameters) for tool in body.tools or ()]


def document_texts(body: ChatCompletionRequest) -> list[str]:
    """The texts of a request's documents, without their titles."""
    documents = body.documents or ()
    return [document if isinstance(document, str) else document.text for document in documents]


def _with_documents_as_text(
    body: ChatCompletionRequest, reader: PromptReader
) -> ChatCompletionRequest:
    """For a template that takes no documents: they follow the system message's text."""
    if not body.documents or reader.template_uses_documents:
        return body
    titles = [None if isinstance(d, str) else d.title for d in body.documents]
    passages = [
        text if title is None else f"{title}\n{text}"
        for title, text in zip(titles, document_texts(body), strict=True)
    ]
    block = "\n\n".join(("Documents:", *passages))
    first, rest = body.messages[0], body.messages[1:]
    if first.role in ("system", "developer"):
        system = first.model_copy(update={"content": f"{_text_of(first)}\n\n{block}"})
    else:
        system, rest = ChatMessage(role="system", content=block), body.messages
    return body.model_copy(update={"messages": [system, *rest], "documents": None})


def _template_variables(body: ChatCompletionRequest) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    if "documents" in variables:
        message = "chat_template_kwargs must not have documents; fix: send them as a field"
        raise ApiError(400, message, param="chat_template_kwargs")
    if body.documents:
        variables["documents"] = [
            {"title": "", "text": document}
            if isinstance(document, str)
            else {"title": "", **document.model_dump(exclude_none=True)}
            for document in body.documents
        ]
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        variables.setdefault("enable_thinking", body.reasoning_effort != "none")
    return variables


def prompt_entries(prompt: str | Sequence[Any]) -> list[str | list[int]]:
    """The four shapes of `prompt` as a list of texts or token lists."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[*prompt]]
    return list(prompt)


async def to_prompt(
    entry: str | list[int],
    reader: PromptReader,
    add_special_tokens: bool,
    *,
    is_cut: bool = False,
) -> TokenPrompt:
    """One text or token list as a prompt; ApiError 400 if it is empty."""
    if not entry:
        message = "prompt is empty; fix: send at least one token of text"
        raise ApiError(400, message, param="prompt")
    if not isinstance(entry, str):
        return TokenPrompt(tuple(entry))
    prompt = await reader.read(entry, add_special_tokens=add_special_tokens, is_cut=is_cut)
    if not prompt.tokens:
        raise ApiError(400, "prompt has no tokens", param="prompt")
    return prompt


def _shared_params(body: CompletionRequestBase, marks: ThinkingMarks | None) -> dict[str, Any]:
    _check_limits(body)
    if body.thinking_token_budget is not None and marks is None:
        message = "thinking_token_budget needs a server that knows how its model marks its thinking"
        fix = "fix: serve with --reasoning-parser, or leave thinking_token_budget out"
        raise ApiError(400, f"{message}; {fix}", param="thinking_token_budget")
    params = {name: getattr(body, name) for name in _SAME_NAME & body.model_fields_set}
    if body.stop is not None:
        params["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    for name in ("stop_token_ids", "allowed_token_ids"):
        if getattr(body, name) is not None:
            params[name] = tuple(getattr(body, name))
    if body.use_beam_search:
        params |= _beam_search(body)
    if body.bad_words:
        params["bad_words"] = tuple(body.bad_words)
    if body.thinking_token_budget is not None:
        params["thinking_marks"] = marks
    params["structured"] = requested_grammar(body)
    if body.kv_eviction is not None:
        params["kv_eviction"] = requested_eviction(body.kv_eviction)
    return {name: value for name, value in params.items() if value is not None}


def requested_eviction(value: Mapping[str, Any]) -> KvEviction:
    """The eviction policy of a request; ApiError 400 for unknown keys and values out of range."""
    try:
        return msgspec.convert(value, KvEviction)
    except (msgspec.ValidationError, BadInput) as error:
        raise ApiError(400, f"kv_eviction: {error}", param="kv_eviction") from None


def _beam_search(body: CompletionRequestBase) -> dict[str, Any]:
    """Beam search with n beams; ApiError 400 for a temperature, which would change nothing."""
    if body.temperature not in (None, 0, 1):
        message = "temperature has no effect with use_beam_search; fix: leave it out"
        raise ApiError(400, message, param="temperature")
    length_penalty = 1.0 if body.length_penalty is None else body.length_penalty
    beam = BeamSearch(length_penalty, body.early_stopping or False)
    # the model's own default penalties would change the scores
    penalty = 1.0 if body.repetition_penalty is None else body.repetition_penalty
    return {"beam": beam, "temperature": 0.0, "repetition_penalty": penalty}


def _check_limits(body: CompletionRequestBase) -> None:
    if body.n is not None and body.n < 1:
        message = f"n is out of range; got {body.n}; limit: [1, {LIMITS.max_n}]"
        raise ApiError(400, message, param="n")
    check_limit("n", body.n or 1, LIMITS.max_n, "choices")
    if stops := [body.stop] if isinstance(body.stop, str) else body.stop:
        check_limit("stop", len(stops), LIMITS.max_stop, "stop strings")
        longest = max(map(len, stops))
        check_limit("stop", longest, LIMITS.max_stop_chars, "characters in a stop string")
    if body.bad_words:
        check_limit("bad_words", len(body.bad_words), LIMITS.max_bad_words, "words")
        longest = max(map(len, body.bad_words))
        check_limit("bad_words", longest, LIMITS.max_stop_chars, "characters in a bad word")
    if body.logit_bias:
        check_limit("logit_bias", len(body.logit_bias), LIMITS.max_logit_bias, "entries")
    for name in ("stop_token_ids", "allowed_token_ids"):
        if ids := getattr(body, name):
            check_limit(name, len(ids), LIMITS.max_token_ids, "token ids")


def _max_tokens(body: CompletionRequestBase) -> int | None:
    newer = body.max_completion_tokens
    if newer == 0 and isinstance(body, ChatCompletionRequest):
        message = "max_completion_tokens is out of range; got 0; limit: [1, inf)"
        raise ApiError(400, message, param="max_completion_tokens")
    return body.max_tokens if newer is None else newer


def truncate(prompt: TokenPrompt, num_tokens: int | None) -> TokenPrompt:
    """Only the last `num_tokens` of a prompt."""
    if num_tokens is None or len(prompt.tokens) <= num_tokens:
        return prompt
    return TokenPrompt(prompt.tokens[-num_tokens:], num_charged=prompt.num_charged)


def _num_chars(message: ChatMessage) -> int:
    return len(_text_of(message))


def _text_of(message: ChatMessage) -> str:
    content = message.content or ""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _template_message(message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates expect it."""
    content: Any = message.content
    if isinstance(content, list):
        content = [{"type": "text", "text": part.text} for part in content]
    plain = {**(message.model_extra or {}), "role": message.role, "content": content}
    if message.tool_calls:
        plain["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _template_call(call: ChatToolCall) -> dict[str, Any]:
    """A call as chat templates expect it: its arguments are a value, if they are JSON."""
    try:
        arguments: Any = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = call.function.arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
