"""llama.cpp's answers for scripts/gguf_parity.py, in an environment that has llama-cpp-python.

Reads a request as JSON from standard input and writes the answers as JSON to standard output:
token ids of `texts`, greedy tokens of `prompts` with their log-probabilities and the distance to
the second token, and the summed negative log-likelihood of `windows`. With `to_float32` the model
is first converted to a float32 file at that path, so that llama.cpp does not round activations.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp as ll
import numpy as np


@ll.llama_log_callback
def _quiet(level: int, text: Any, data: Any) -> None:
    pass


class Model:
    def __init__(self, path: str, context: int, *, vocab_only: bool = False) -> None:
        params = ll.llama_model_default_params()
        params.vocab_only = vocab_only
        self.model = ll.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.vocab = ll.llama_model_get_vocab(self.model)
        self.vocab_size = ll.llama_vocab_n_tokens(self.vocab)
        if vocab_only:
            return
        settings = ll.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = context
        settings.n_threads = settings.n_threads_batch = 1
        settings.type_k = settings.type_v = 0  # float32
        settings.flash_attn_type = 0
        self.context = ll.llama_init_from_model(self.model, settings)
        if not self.context:
            raise SystemExit("llama.cpp cannot make the context")
        self.batch = ll.llama_batch_init(context, 0, 1)

    def tokens(self, text: str, *, special: bool = True) -> list[int]:
        raw = text.encode()
        out = (ll.llama_token * (len(raw) + 16))()
        num = ll.llama_tokenize(self.vocab, raw, len(raw), out, len(raw) + 16, special, True)
        return [out[i] for i in range(num)]

    def ends(self) -> list[int]:
        return [i for i in range(self.vocab_size) if ll.llama_vocab_is_eog(self.vocab, i)]

    def logprobs(self, tokens: list[int], start: int, *, all_rows: bool) -> Any:
        """Log-probabilities after each of `tokens` (or the last), at positions from `start`."""
        if start == 0:
            ll.llama_memory_clear(ll.llama_get_memory(self.context), True)
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, start + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = all_rows or i == len(tokens) - 1
        if ll.llama_decode(self.context, batch):
            raise SystemExit("llama.cpp could not decode")
        rows = len(tokens) if all_rows else 1
        data = np.ctypeslib.as_array(ll.llama_get_logits(self.context), (rows, self.vocab_size))
        logits = data.astype(np.float64)
        top = logits.max(1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))

    def greedy(self, prompt: list[int], count: int, ends: set[int]) -> dict[str, list[Any]]:
        out: dict[str, list[Any]] = {"tokens": [], "logprobs": [], "gaps": []}
        row = self.logprobs(prompt, 0, all_rows=False)[0]
        for step in range(count):
            second, first = np.sort(row)[-2:]
            token = int(row.argmax())
            out["tokens"].append(token)
            out["logprobs"].append(float(first))
            out["gaps"].append(float(first - second))
            if token in ends or step == count - 1:
                break
            row = self.logprobs([token], len(prompt) + step, all_rows=False)[0]
        return out

    def loss(self, window: list[int]) -> float:
        rows = self.logprobs(window[:-1], 0, all_rows=True)
        return float(-rows[np.arange(len(window) - 1), window[1:]].sum())


def _to_float32(source: str, target: str) -> None:
    params = ll.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = 0, True, 2
    if ll.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise SystemExit("llama.cpp cannot convert the model")


def main() -> None:
    ll.llama_log_set(_quiet, ctypes.c_void_p(0))
    ll.llama_backend_init()
    request = json.load(sys.stdin)
    if "vocabularies" in request:
        vocabularies = (Model(path, 1, vocab_only=True) for path in request["vocabularies"])
        encoded = [[model.tokens(t) for t in request["texts"]] for model in vocabularies]
        json.dump({"vocabularies": encoded}, sys.stdout)
        return
    path = request["model"]
    if request.get("to_float32"):
        if not Path(request["to_float32"]).is_file():
            _to_float32(path, request["to_float32"])
        path = request["to_float32"]
    prompts, windows = request.get("prompts", []), request.get("windows", [])
    context = max([1, *(len(p) + request.get("count", 0) for p in prompts), *map(len, windows)])
    model = Model(path, context, vocab_only=not prompts and not windows)
    ends = model.ends()
    answer = {
        "ends": ends,
        "tokens": [model.tokens(text) for text in request.get("texts", [])],
        "greedy": [model.greedy(p, request["count"], set(ends)) for p in prompts],
        "losses": [model.loss(window) for window in windows],
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
