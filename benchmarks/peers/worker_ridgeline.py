"""Ridgeline's own scheduler and runner: `python worker_ridgeline.py MODEL THREADS FLAGS_JSON`."""

from __future__ import annotations

import itertools
import json
import os
import sys
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `ridgeline` sets it

import talk
import torch

from ridgeline.config.settings import settings_from
from ridgeline.engine.build import assemble
from ridgeline.engine.config import resolve
from ridgeline.engine.tokenization.event_texts import EventTexts
from ridgeline.records import Request, Sampling

FOREVER = None


class Ridgeline:
    def __init__(self, model: str, threads: int, flags: dict[str, Any]) -> None:
        given = {"model": model, "num_threads": threads, "enable_prefix_caching": False, **flags}
        resolved = resolve(settings_from(given))
        torch.set_num_threads(resolved.num_threads)
        self.parts = assemble(resolved)
        self.texts = EventTexts(self.parts.tokenizer, lambda *_: [])
        self.names, self.live = itertools.count(), list[str]()
        self.now_s = 0.0

    def _add(self, prompt: list[int], tokens: int | None) -> None:
        name = str(next(self.names))
        sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        request = Request(id=name, prompt=tuple(prompt), sampling=sampling, arrival_s=self.now_s)
        self.texts.begin(request)
        self.parts.scheduler.add(request)
        self.live.append(name)

    def _step(self) -> Any:
        self.now_s += 1.0
        plan = self.parts.scheduler.plan(self.now_s)
        result = self.parts.runner.run(plan)
        self.texts.add_texts(self.parts.scheduler.commit(plan, result, self.now_s))
        return plan

    def prepare(self, work: dict[str, Any]) -> None:
        for name in self.live:
            self.parts.scheduler.cancel(name, self.now_s)
        self.live = []
        self.work = work
        if work["kind"] == "decode":
            for prompt in talk.prompts(work["sequences"], work["context"]):
                self._add(prompt, FOREVER)
            while any(len(run.tokens) > 1 for run in self._step().runs):
                pass

    def run(self, order: dict[str, Any]) -> int:
        if self.work["kind"] == "prefill":
            self._add(talk.prompts(1, self.work["tokens"], order["seed"])[0], 1)
            read = 0
            while read < self.work["tokens"]:
                read += sum(len(run.tokens) for run in self._step().runs)
            self.live = []
            return read
        made = 0
        for _ in range(order["steps"]):
            made += len(self._step().runs)
        return made


if __name__ == "__main__":
    talk.serve(lambda: Ridgeline(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])))
