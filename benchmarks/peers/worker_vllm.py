"""vLLM's CPU build: `python worker_vllm.py HF_FOLDER THREADS`. Weights in bfloat16, eager."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import talk


class Vllm:
    def __init__(self, folder: str, threads: int) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        from vllm import LLM

        self.engine = LLM(
            folder,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=4096,
            max_num_seqs=64,
            max_num_batched_tokens=4096,
            enable_prefix_caching=False,
        ).llm_engine
        self.live: list[str] = []
        self.asked = 0

    def _add(self, prompt: list[int], tokens: int) -> None:
        from vllm import SamplingParams

        self.asked += 1
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        self.engine.add_request(str(self.asked), {"prompt_token_ids": prompt}, sampling)
        self.live.append(str(self.asked))

    def prepare(self, work: dict[str, Any]) -> None:
        self.engine.abort_request(self.live)
        self.live = []
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.work = work
        if work["kind"] == "decode":
            for prompt in talk.prompts(work["sequences"], work["context"]):
                self._add(prompt, 2048)
            began: set[str] = set()
            while len(began) < work["sequences"]:
                began |= {out.request_id for out in self.engine.step() if out.outputs[0].token_ids}

    def run(self, order: dict[str, Any]) -> int:
        if self.work["kind"] == "prefill":
            self._add(talk.prompts(1, self.work["tokens"], order["seed"])[0], 1)
            while self.engine.has_unfinished_requests():
                self.engine.step()
            self.live = []
            return int(self.work["tokens"])
        return sum(len(self.engine.step()) for _ in range(order["steps"]))


if __name__ == "__main__":
    talk.serve(lambda: Vllm(sys.argv[1], int(sys.argv[2])))
