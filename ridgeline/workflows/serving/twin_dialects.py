"""The routes that only other servers have, over a twin: what their quality gate is read from.

  sglang         /generate, with log-probabilities of the prompt and of the answer
  tgi            /generate, with `details` and `decoder_input_details`
  llama-server   /completion, with `n_probs`

Each is the twin's own completion, written as that server writes it. Nothing is streamed here: load
goes to the OpenAI routes, which all of these servers have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from ridgeline.serve.bodies.routing import JsonRoute
from ridgeline.serve.errors import ApiError, from_validation
from ridgeline.serve.generation.respond import json_response
from ridgeline.serve.openai.routes import create_completion
from ridgeline.serve.openai.schemas import CompletionRequest
from ridgeline.serve.service import Service, ServiceDep

Body = dict[str, Any]
ID = "token_id:"


class DialectToken(msgspec.Struct, frozen=True):
    """A token, its text and its log-probability (None for the first token of a prompt)."""

    token: int
    text: str
    logprob: float | None


class Position(msgspec.Struct, frozen=True):
    """The token at one position, and the likeliest ones there, likeliest first."""

    own: DialectToken
    top: tuple[DialectToken, ...]


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    """A completion: its text, and the positions of the prompt and of the answer."""

    text: str
    prompt: tuple[Position, ...]
    answer: tuple[Position, ...]
    finish_reason: str
    num_prompt: int

    @property
    def tokens(self) -> list[int]:
        """The ids of the answer."""
        return [position.own.token for position in self.answer]


async def _complete(
    request: Request, service: Service, fields: Mapping[str, Any], *, scores_prompt: bool = False
) -> Completed:
    """Run a completion with the given fields of /v1/completions and read it back."""
    num_top = fields.get("logprobs", 0)
    body: Body = {
        **{name: value for name, value in fields.items() if value is not None},
        "model": service.name,
        "logprobs": num_top,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if scores_prompt:
        body["prompt_logprobs"] = num_top
    try:
        checked = CompletionRequest.model_validate(body)
    except ValidationError as error:
        raise from_validation(error, body) from None
    response = await create_completion(checked, request, service)
    [choice, *_] = json.loads(bytes(response.body))["choices"]
    decode = service.engine.tokenizer.decode

    def dialect_token(token: int, logprob: float | None) -> DialectToken:
        return DialectToken(token, decode([token], skip_special_tokens=False), logprob)

    def position(token: int, logprob: float | None, row: Mapping[int, float]) -> Position:
        best = sorted(row.items(), key=lambda pair: -pair[1])[:num_top]
        return Position(dialect_token(token, logprob), tuple(dialect_token(*pair) for pair in best))

    prompt = []
    for token, row in zip(
        choice["prompt_token_ids"], choice.get("prompt_logprobs") or (), strict=False
    ):
        row = row or {}
        own = row[str(token)]["logprob"] if row else None
        top = {int(key): v["logprob"] for key, v in row.items() if v["rank"] <= num_top}
        prompt.append(position(token, own, top))
    logprobs = choice["logprobs"]
    answer = [
        position(
            token, own, {int(key.removeprefix(ID)): value for key, value in (top or {}).items()}
        )
        for token, own, top in zip(
            choice["token_ids"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        )
    ]
    return Completed(
        text=choice["text"],
        prompt=tuple(prompt),
        answer=tuple(answer),
        finish_reason=choice["finish_reason"] or "length",
        num_prompt=len(choice["prompt_token_ids"]),
    )


def _refuse_stream(body: Mapping[str, Any]) -> None:
    if body.get("stream"):
        raise ApiError(400, "a twin does not stream here; fix: stream /v1/completions")


def _prompt(body: Mapping[str, Any], *names: str) -> Any:
    prompt = next((body[name] for name in names if body.get(name) is not None), None)
    if prompt is None:
        raise ApiError(400, f"the body needs the field {' or '.join(names)}", param=names[0])
    return prompt


# ---- SGLang ------------------------------------------------------------------------------------

sglang_router = APIRouter(tags=["SGLang"], route_class=JsonRoute)


@sglang_router.post("/generate", summary="SGLang's own generation", response_model=None)
async def sglang_generate(body: Body, request: Request, service: ServiceDep) -> Response:
    """`text` or `input_ids`, `sampling_params`, and log-probabilities from `logprob_start_len`."""
    _refuse_stream(body)
    sampling, wanted = dict(body.get("sampling_params") or {}), bool(body.get("return_logprob"))
    start = int(body.get("logprob_start_len", -1))
    done = await _complete(
        request,
        service,
        {
            "prompt": _prompt(body, "text", "input_ids"),
            "max_tokens": sampling.pop("max_new_tokens", 128),
            "logprobs": int(body.get("top_logprobs_num") or 0) if wanted else 0,
            **sampling,
        },
        scores_prompt=wanted and start >= 0,
    )
    finish = {"type": done.finish_reason, "length": len(done.answer)}
    meta: Body = {
        "prompt_tokens": done.num_prompt,
        "completion_tokens": len(done.answer),
        "finish_reason": finish,
    }
    if wanted:
        scored = done.prompt[max(0, start) :]
        meta |= {
            "input_token_logprobs": [_sglang_row(at.own) for at in scored],
            "input_top_logprobs": [_sglang_top(at) for at in scored],
            "output_token_logprobs": [_sglang_row(at.own) for at in done.answer],
            "output_top_logprobs": [_sglang_top(at) for at in done.answer],
        }
    return json_response({"text": done.text, "output_ids": done.tokens, "meta_info": meta})


def _sglang_row(token: DialectToken) -> tuple[float | None, int, None]:
    return (token.logprob, token.token, None)


def _sglang_top(position: Position) -> list[tuple[float | None, int, None]] | None:
    return [_sglang_row(row) for row in position.top] or None


# ---- Text Generation Inference -----------------------------------------------------------------

tgi_router = APIRouter(tags=["TGI"], route_class=JsonRoute)


@tgi_router.post("/generate", summary="TGI's own generation", response_model=None)
async def tgi_generate(body: Body, request: Request, service: ServiceDep) -> Response:
    """`inputs` and `parameters`; greedy unless `do_sample` or a temperature is given."""
    _refuse_stream(body)
    parameters = dict(body.get("parameters") or {})
    sampled = parameters.get("do_sample") or parameters.get("temperature")
    with_prompt = bool(parameters.get("decoder_input_details"))
    done = await _complete(
        request,
        service,
        {
            "prompt": _prompt(body, "inputs"),
            "max_tokens": parameters.get("max_new_tokens", 100),
            "temperature": parameters.get("temperature", 1.0) if sampled else 0.0,
            "top_p": parameters.get("top_p"),
            "seed": parameters.get("seed"),
            "stop": parameters.get("stop"),
            "logprobs": int(parameters.get("top_n_tokens") or 0),
        },
        scores_prompt=with_prompt,
    )
    reply: Body = {"generated_text": done.text}
    if parameters.get("details"):
        reply["details"] = {
            "finish_reason": "length" if done.finish_reason == "length" else "eos_token",
            "generated_tokens": len(done.answer),
            "seed": parameters.get("seed"),
            "prefill": [_tgi_token(at.own) for at in done.prompt] if with_prompt else [],
            "tokens": [{**_tgi_token(at.own), "special": False} for at in done.answer],
            "top_tokens": [[_tgi_token(row) for row in at.top] for at in done.answer],
        }
    return json_response(reply)


def _tgi_token(token: DialectToken) -> Body:
    return {"id": token.token, "text": token.text, "logprob": token.logprob}


# ---- llama.cpp ---------------------------------------------------------------------------------

llama_router = APIRouter(tags=["llama.cpp"], route_class=JsonRoute)


@llama_router.post("/completion", summary="llama.cpp's own completion", response_model=None)
async def llama_completion(body: Body, request: Request, service: ServiceDep) -> Response:
    """`prompt`, `n_predict`, and `n_probs` candidates at each position of the answer."""
    _refuse_stream(body)
    num_top, number = int(body.get("n_probs") or 0), int(body.get("n_predict", -1))
    done = await _complete(
        request,
        service,
        {
            "prompt": _prompt(body, "prompt"),
            "max_tokens": number if number >= 0 else None,
            "temperature": body.get("temperature", 0.8),
            "ignore_eos": body.get("ignore_eos"),
            "seed": None if body.get("seed", -1) == -1 else body["seed"],
            "stop": body.get("stop") or None,
            "logprobs": num_top,
        },
    )
    reply: Body = {
        "content": done.text,
        "tokens": done.tokens if body.get("return_tokens") else [],
        "stop": True,
        "stop_type": "limit" if done.finish_reason == "length" else "eos",
        "tokens_predicted": len(done.answer),
        "tokens_evaluated": done.num_prompt,
    }
    if num_top:
        reply["completion_probabilities"] = [
            {**_llama_token(at.own), "top_logprobs": [_llama_token(row) for row in at.top]}
            for at in done.answer
        ]
    return json_response(reply)


def _llama_token(token: DialectToken) -> Body:
    return {
        "id": token.token,
        "token": token.text,
        "bytes": list(token.text.encode()),
        "logprob": token.logprob,
    }


ROUTERS: Mapping[str, Sequence[APIRouter]] = {
    "sglang": (sglang_router,),
    "tgi": (tgi_router,),
    "llama-server": (llama_router,),
}
"""Server → its routes besides those of OpenAI."""
