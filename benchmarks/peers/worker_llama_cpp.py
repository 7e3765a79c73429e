"""llama.cpp through its C interface: `python worker_llama_cpp.py MODEL.gguf THREADS [KV_TYPE]`."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import llama_cpp as ll
import numpy as np
import talk

BATCH = 2048


class LlamaCpp:
    def __init__(self, path: str, threads: int, kv_type: str) -> None:
        ll.llama_backend_init()
        self.model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.threads, self.kv_type, self.context = threads, kv_type, None

    def _open(self, sequences: int, length: int) -> None:
        """A fresh context: separate KV for each sequence, as llama-batched-bench has it."""
        if self.context:
            ll.llama_free(self.context)
        params = ll.llama_context_default_params()
        params.n_ctx = sequences * (length + 255) // 256 * 256
        params.n_batch, params.n_ubatch = BATCH, 512
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self.threads
        if self.kv_type == "q8_0":
            params.type_k = params.type_v = ll.GGML_TYPE_Q8_0
            params.flash_attn_type = 1
        self.context = ll.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit("llama.cpp cannot make the context")
        self.batch = ll.llama_batch_init(BATCH, 0, 1)

    def _decode(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """One call of (token, position, sequence, logits?) rows."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, logits) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if ll.llama_decode(self.context, batch):
            raise SystemExit("llama.cpp could not decode")

    def _read(self, sequence: int, prompt: list[int]) -> None:
        last = len(prompt) - 1
        for begin in range(0, len(prompt), BATCH):
            part = prompt[begin : begin + BATCH]
            rows = enumerate(part, begin)
            self._decode([(token, at, sequence, at == last) for at, token in rows])
        self.next[sequence] = self._largest(-1)

    def _largest(self, row: int) -> int:
        logits = ll.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, shape=(talk.VOCAB,)).argmax())

    def prepare(self, work: dict[str, Any]) -> None:
        self.work, self.next = work, {}
        if work["kind"] == "prefill":
            self._open(1, work["tokens"] + 8)
            return
        self._open(work["sequences"], work["context"] + 512)
        self.position = work["context"]
        for sequence, prompt in enumerate(talk.prompts(work["sequences"], work["context"])):
            self._read(sequence, prompt)

    def run(self, order: dict[str, Any]) -> int:
        if self.work["kind"] == "prefill":
            ll.llama_memory_clear(ll.llama_get_memory(self.context), True)
            self._read(0, talk.prompts(1, self.work["tokens"], order["seed"])[0])
            return int(self.work["tokens"])
        sequences = self.work["sequences"]
        for _ in range(order["steps"]):
            rows = [(self.next[s], self.position, s, True) for s in range(sequences)]
            self._decode(rows)
            self.position += 1
            self.next = {s: self._largest(s) for s in range(sequences)}
        return int(sequences * order["steps"])


if __name__ == "__main__":
    silence = ll.llama_log_callback(lambda level, text, data: None)
    ll.llama_log_set(silence, ctypes.c_void_p(0))
    kv = sys.argv[3] if len(sys.argv) > 3 else "f16"
    talk.serve(lambda: LlamaCpp(sys.argv[1], int(sys.argv[2]), kv))
