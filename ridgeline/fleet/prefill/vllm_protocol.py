"""How a vLLM server is asked for the keys and values of a prompt.

    body, cut down to one token, + kv_transfer_params {"do_remote_decode": true, …}
        ──▶  a server with a KV connector, which answers once the prompt is computed:
             kv_transfer_params {"do_remote_prefill": true, "remote_engine_id": …, …}
    body + those fields, unread  ──▶  a decode server, which fetches the blocks

The protocol is that of vLLM's NixlConnector, as in its example of a proxy
(tests/v1/kv_connector/nixl_integration/toy_proxy_server.py) and its source of 0.32. The blocks
are kept under a lease until they are fetched, and one fetch ends it: a request that would fetch
them more than once is not handed over.
"""

from __future__ import annotations

from typing import Any

ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
LIMITS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
"""Path → the field of its body that limits the answer."""

_CHAT_LIMIT = "max_completion_tokens"  # takes precedence in a body that has it
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "min_completion_tokens")
_WITH_MANY_ANSWERS = ("n", "best_of")
_WITH_PROMPT_LOGITS = ("prompt_logprobs", "echo", "use_beam_search")


def can_hand_over(body: dict[str, Any]) -> bool:
    """Whether one fetch of the prompt's blocks is all that the request needs.

    Several prompts or answers fetch more than once, and probabilities of the prompt are computed
    with it.
    """
    prompt = body.get("prompt")
    is_single = not isinstance(prompt, list) or all(isinstance(token, int) for token in prompt)
    is_one_answer = all(body.get(name) in (None, 1) for name in _WITH_MANY_ANSWERS)
    given = [body[name] for name in _WITH_PROMPT_LOGITS if name in body]
    needs_logits = any(value is not None and value is not False for value in given)
    return is_single and is_one_answer and not needs_logits


def prefill_body(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body that has the prompt computed: one token, whole, without what needs more."""
    fields = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    fields |= {LIMITS[path]: 1, "stream": False, "kv_transfer_params": ASK}
    if _CHAT_LIMIT in body:
        fields[_CHAT_LIMIT] = 1
    return fields
