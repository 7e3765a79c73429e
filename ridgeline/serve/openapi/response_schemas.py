"""The schemas of what the server says, written down beside those that read what it is told.

Answers are plain builtins, so nothing makes these by itself: the tests hold every answer, whole or
streamed, against them (`tests/serve/test_openapi.py`, `scripts/fuzz_api.py`). The part of a schema
that is `required` is what a client may rely on.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
REF = "#/components/schemas/"
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
ANY_TEXT: Schema = {"type": ["string", "null"]}
FLAG: Schema = {"type": "boolean"}
MAP: Schema = {"type": "object"}


def object_of(required: dict[str, Schema], **more: Schema) -> Schema:
    """An object with these fields, the first ones always there."""
    return {"type": "object", "properties": {**required, **more}, "required": list(required)}


def list_of(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def ref(name: str) -> Schema:
    return {"$ref": REF + name}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_USAGE = object_of(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": object_of({"cached_tokens": COUNT}),
    }
)
USAGE_IN_OUT = object_of(
    {
        "input_tokens": COUNT,
        "input_tokens_details": object_of({"cached_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": object_of({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    }
)  # as responses and batches tell it
_TIMES = object_of(
    {
        name: {"type": ["number", "null"]}
        for name in (
            "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms",
            "tokens_per_second",
        )
    }
)  # fmt: skip
_REASONS = ["stop", "length", "tool_calls", "abort"]
_ENDING: dict[str, Schema] = {
    "index": COUNT,
    "finish_reason": {"enum": _REASONS},
    "stop_reason": {"type": ["string", "integer", "null"]},
}
_CHUNK_ENDING: dict[str, Schema] = {"index": COUNT, "finish_reason": {"enum": [*_REASONS, None]}}
_LOGPROB: Schema = {"type": "number", "maximum": 0}
_TOKEN_LOGPROB = object_of({"token": TEXT, "logprob": _LOGPROB, "bytes": list_of(COUNT)})
_COMPLETION_LOGPROBS = object_of(
    {
        "tokens": list_of(TEXT),
        "token_logprobs": list_of(nullable(_LOGPROB)),
        "top_logprobs": list_of(nullable({"type": "object", "additionalProperties": _LOGPROB})),
        "text_offset": list_of(COUNT),
    }
)
_CHAT_LOGPROBS = object_of(
    {
        "content": list_of(
            {
                **_TOKEN_LOGPROB,
                "properties": {
                    **_TOKEN_LOGPROB["properties"],
                    "top_logprobs": list_of(_TOKEN_LOGPROB),
                },
                "required": [*_TOKEN_LOGPROB["required"], "top_logprobs"],
            }
        )
    }
)
_PROMPT_LOGPROBS = list_of(
    nullable(
        {
            "type": "object",
            "additionalProperties": object_of(
                {"logprob": _LOGPROB, "rank": COUNT, "decoded_token": TEXT}
            ),
        }
    )
)
_CALL = object_of(
    {
        "id": TEXT,
        "type": {"const": "function"},
        "function": object_of({"name": TEXT, "arguments": TEXT}),
    },
    index=COUNT,
)
_IDS: dict[str, Schema] = {"token_ids": list_of(COUNT), "prompt_token_ids": list_of(COUNT)}


def _head(kind: str) -> dict[str, Schema]:
    return {"id": TEXT, "object": {"const": kind}, "created": COUNT, "model": TEXT}


_COMPLETION: dict[str, Schema] = {
    "Completion": object_of(
        {
            **_head("text_completion"),
            "choices": list_of(
                object_of(
                    {**_ENDING, "text": TEXT, "logprobs": nullable(_COMPLETION_LOGPROBS)},
                    prompt_logprobs=_PROMPT_LOGPROBS,
                    **_IDS,
                ),
                minItems=1,
            ),
            "usage": _USAGE,
        },
        metrics=_TIMES,
    ),
    "CompletionChunk": object_of(
        {
            **_head("text_completion"),
            "choices": list_of(
                object_of(
                    {**_CHUNK_ENDING, "text": TEXT, "logprobs": nullable(_COMPLETION_LOGPROBS)},
                    stop_reason=_ENDING["stop_reason"],
                    **_IDS,
                )
            ),
        },
        usage=_USAGE,
        metrics=_TIMES,
    ),
}
_CHAT: dict[str, Schema] = {
    "ChatCompletion": object_of(
        {
            **_head("chat.completion"),
            "choices": list_of(
                object_of(
                    {
                        **_ENDING,
                        "message": object_of(
                            {"role": {"const": "assistant"}, "content": ANY_TEXT},
                            refusal={"type": "null"},
                            tool_calls=list_of(_CALL, minItems=1),
                            reasoning_content=TEXT,
                        ),
                        "logprobs": nullable(_CHAT_LOGPROBS),
                    },
                    token_ids=_IDS["token_ids"],
                ),
                minItems=1,
            ),
            "usage": _USAGE,
        },
        metrics=_TIMES,
        prompt_logprobs=_PROMPT_LOGPROBS,
    ),
    "ChatCompletionChunk": object_of(
        {
            **_head("chat.completion.chunk"),
            "choices": list_of(
                object_of(
                    {
                        **_CHUNK_ENDING,
                        "delta": object_of(
                            {},
                            role={"const": "assistant"},
                            content=ANY_TEXT,
                            reasoning_content=TEXT,
                            tool_calls=list_of(_CALL, minItems=1),
                        ),
                        "logprobs": nullable(_CHAT_LOGPROBS),
                    },
                    stop_reason=_ENDING["stop_reason"],
                    token_ids=_IDS["token_ids"],
                )
            ),
        },
        usage=_USAGE,
        metrics=_TIMES,
    ),
}
_MESSAGE_USAGE = object_of(
    {
        "input_tokens": COUNT,
        "output_tokens": COUNT,
        "cache_read_input_tokens": COUNT,
        "cache_creation_input_tokens": COUNT,
    }
)
_BLOCK: Schema = {
    "oneOf": [
        object_of({"type": {"const": "text"}, "text": TEXT}),
        object_of({"type": {"const": "thinking"}, "thinking": TEXT, "signature": TEXT}),
        object_of({"type": {"const": "tool_use"}, "id": TEXT, "name": TEXT, "input": MAP}),
    ]
}
_ANTHROPIC: dict[str, Schema] = {
    "Message": object_of(
        {
            "id": TEXT,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": TEXT,
            "content": list_of(_BLOCK),
            "stop_reason": {
                "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "abort"]
            },
            "stop_sequence": ANY_TEXT,
            "usage": _MESSAGE_USAGE,
        }
    ),
    "MessageEvent": object_of(
        {
            "type": {
                "enum": [
                    "message_start", "content_block_start", "content_block_delta",
                    "content_block_stop", "message_delta", "message_stop", "error",
                ]
            }
        },
        index=COUNT,
        content_block=_BLOCK,
        delta=MAP,
        usage=_MESSAGE_USAGE,
        message=MAP,
        error=object_of({"type": TEXT, "message": TEXT}),
    ),
    "TokenCount": object_of({"input_tokens": COUNT}),
    "AnthropicError": object_of(
        {"type": {"const": "error"}, "error": object_of({"type": TEXT, "message": TEXT})}
    ),
}  # fmt: skip
_RESPONSES: dict[str, Schema] = {
    "Response": object_of(
        {
            "id": TEXT,
            "object": {"const": "response"},
            "created_at": COUNT,
            "status": {"enum": ["completed", "incomplete"]},
            "error": {"type": "null"},
            "incomplete_details": nullable(
                object_of({"reason": {"enum": ["max_output_tokens", "abort"]}})
            ),
            "model": TEXT,
            "output": list_of(
                object_of(
                    {"type": {"enum": ["message", "function_call", "reasoning"]}, "id": TEXT},
                    content=list_of(object_of({"type": TEXT, "text": TEXT})),
                    call_id=TEXT,
                    name=TEXT,
                    arguments=TEXT,
                )
            ),
            "usage": USAGE_IN_OUT,
            "store": {"const": False},
        }
    ),
    "ResponseEvent": {
        **object_of({"type": {"type": "string", "pattern": "^(response\\.[a-z_.]+|error)$"}}),
        "description": "One of the events of OpenAI's Responses, or `error`, which ends a stream.",
    },
}
_MODEL = object_of(
    {
        "id": TEXT,
        "object": {"const": "model"},
        "created": COUNT,
        "owned_by": TEXT,
        "max_model_len": COUNT,
    }
)
_OTHERS: dict[str, Schema] = {
    "Embeddings": object_of(
        {
            "object": {"const": "list"},
            "model": TEXT,
            "data": list_of(
                object_of(
                    {
                        "object": {"const": "embedding"},
                        "index": COUNT,
                        "embedding": {"anyOf": [list_of(NUMBER), TEXT]},
                    }
                )
            ),
            "usage": object_of({"prompt_tokens": COUNT, "total_tokens": COUNT}),
        }
    ),
    "Tokens": object_of(
        {
            "count": COUNT,
            "max_model_len": COUNT,
            "tokens": list_of(COUNT),
            "token_strs": nullable(list_of(TEXT)),
        }
    ),
    "Text": object_of({"prompt": TEXT}),
    "Models": object_of({"object": {"const": "list"}, "data": list_of(_MODEL, minItems=1)}),
    "Model": _MODEL,
    "Version": object_of({"version": TEXT}),
    "Config": object_of(
        {
            "version": TEXT,
            "served_model_name": TEXT,
            "slo": nullable(MAP),
            "slo_classes": MAP,
            "batches": FLAG,
            "model": TEXT,
            "settings": MAP,
            "derivations": MAP,
            "max_model_len": COUNT,
            "num_blocks": COUNT,
            "block_size": COUNT,
        }
    ),
    "Error": object_of(
        {"error": object_of({"message": TEXT, "type": TEXT, "param": ANY_TEXT, "code": COUNT})}
    ),
}
ANSWERS: dict[str, Schema] = {**_COMPLETION, **_CHAT, **_ANTHROPIC, **_RESPONSES, **_OTHERS}
EVENTS = {
    "Completion": "CompletionChunk",
    "ChatCompletion": "ChatCompletionChunk",
    "Response": "ResponseEvent",
    "Message": "MessageEvent",
}
"""Whole answer → what one event of the same answer as a stream holds."""

STATE = object_of(
    {
        "model": TEXT,
        "settings": MAP,
        "derivations": MAP,
        "counters": {"type": "object", "additionalProperties": NUMBER},
        "draining": FLAG,
        "under_way": COUNT,
    }
)
ADMIN_ANSWERS: dict[str, Schema] = {
    "State": STATE,
    "Draining": object_of({"draining": {"const": True}}),
    "Aborted": object_of({"aborted": TEXT}),
    "Error": _OTHERS["Error"],
}
