"""OpenVINO GenAI's continuous batching: `python worker_openvino.py MODELS_FOLDER THREADS`.

Keys and values are kept as its CPU plugin chooses (8 bits). The tokenizer, which this measurement
does not use but the pipeline wants, comes from llama.cpp's file.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
import talk

FOREVER = 100_000


class OpenVino:
    def __init__(self, folder: str, threads: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = False
        tokenizer = genai.Tokenizer(f"{folder}/q4_0.gguf")
        self.pipe = genai.ContinuousBatchingPipeline(
            f"{folder}/openvino", tokenizer, scheduler, "CPU", INFERENCE_NUM_THREADS=threads
        )
        self.handles: list[Any] = []
        self.asked = 0

    def _add(self, prompt: list[int], tokens: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        self.asked += 1
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        return self.pipe.add_request(self.asked, ids, config)

    def _drop(self) -> None:
        for handle in self.handles:
            handle.stop()
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
        self.handles = []

    def prepare(self, work: dict[str, Any]) -> None:
        self._drop()
        self.work = work
        if work["kind"] != "decode":
            return
        waiting = talk.prompts(work["sequences"], work["context"])
        self.handles = [self._add(prompt, FOREVER) for prompt in waiting]
        while not all(_began(handle) for handle in self.handles):
            self.pipe.step()

    def run(self, order: dict[str, Any]) -> int:
        if self.work["kind"] == "chat":
            return self._chat(order["seed"])
        if self.work["kind"] == "prefill":
            handle = self._add(talk.prompts(1, self.work["tokens"], order["seed"])[0], 1)
            while self.pipe.has_non_finished_requests():
                self.pipe.step()
            assert _began(handle)
            return int(self.work["tokens"])
        for _ in range(order["steps"]):
            self.pipe.step()
        return sum(_count(handle) for handle in self.handles)

    def _chat(self, seed: int) -> int:
        """A closed loop: each client asks again as soon as it is answered."""
        work = self.work
        waiting = talk.prompts(work["requests"], work["input"], seed)
        live: list[Any] = []
        done = 0
        while waiting or live:
            while waiting and len(live) < work["clients"]:
                live.append(self._add(waiting.pop(), work["output"]))
            self.pipe.step()
            done += sum(_count(handle) for handle in live)
            live = [h for h in live if h.get_status() == genai.GenerationStatus.RUNNING]
        return done


def _count(handle: Any) -> int:
    """Tokens since it was last asked. A read gives one step's."""
    found = 0
    while handle.can_read():
        found += sum(len(output.generated_ids) for output in handle.read().values())
    return found


def _began(handle: Any) -> bool:
    return _count(handle) > 0


if __name__ == "__main__":
    talk.serve(lambda: OpenVino(sys.argv[1], int(sys.argv[2])))
