"""Valid bodies of every route that reads one, from which mutations start."""

from __future__ import annotations

from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "find",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
            "required": ["city"],
        },
    },
}
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "!"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "look_up", "arguments": '{"city": "Ulm"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "out",
        "strict": True,
        "schema": {
            "$defs": {"p": {"type": "object", "properties": {"x": {"type": "number"}}}},
            "anyOf": [{"$ref": "#/$defs/p"}, {"type": "array", "items": {"enum": ["a", 1]}}],
        },
    },
}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "hello", "max_tokens": 4, "n": 2, "stop": ["x"], "logprobs": 2, "echo": True},
        {"prompt": ["a", "b"], "max_tokens": 3, "stream": True, "seed": 1, "logit_bias": {"5": 1}},
        {"prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "min_p": 0.1,
         "stream_options": {"include_usage": True}, "priority": 1, "timeout_ms": 500},
        {"prompt": "x", "guided_regex": "a+", "max_tokens": 2, "stop_token_ids": [5],
         "prompt_logprobs": 1, "cache_salt": "s", "request_id": "r"},
    ],
    "/v1/chat/completions": [
        {"messages": MESSAGES[:2], "max_tokens": 4, "logprobs": True, "top_logprobs": 2},
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto", "max_completion_tokens": 3},
        {"messages": MESSAGES[:1], "response_format": SCHEMA, "stream": True, "max_tokens": 3,
         "chat_template_kwargs": {"a": 1}, "add_generation_prompt": True, "stop": "x"},
    ],
    "/v1/responses": [
        {"input": "hello", "max_output_tokens": 3, "instructions": "be brief"},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                   {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "c", "output": "1"}],
         "stream": True, "tools": [{"type": "function", "name": "f", "parameters": {}}],
         "text": {"format": {"type": "json_object"}}, "max_output_tokens": 2},
    ],
    "/v1/messages": [
        {"model": "M", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}],
         "system": [{"type": "text", "text": "brief"}], "stop_sequences": ["x"]},
        {"model": "M", "max_tokens": 3, "stream": True,
         "tools": [{"name": "f", "input_schema": {"type": "object"}}],
         "messages": [
             {"role": "user", "content": [{"type": "text", "text": "hi"}]},
             {"role": "assistant", "content": [
                 {"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
             {"role": "user", "content": [
                 {"type": "tool_result", "tool_use_id": "t", "content": "1"}]}]},
    ],
    "/v1/messages/count_tokens": [{"model": "M", "messages": [{"role": "user", "content": "hi"}]}],
    "/v1/embeddings": [
        {"input": ["a", "b"], "encoding_format": "base64"}, {"input": [1, 2], "dimensions": 2},
    ],
    "/v1/rerank": [{"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}],
    "/v1/score": [{"text_1": "a", "text_2": ["b", "c"]}],
    "/tokenize": [{"prompt": "hi"}, {"messages": MESSAGES[:2], "return_token_strs": True}],
    "/detokenize": [{"tokens": [104, 105]}],
}  # fmt: skip
