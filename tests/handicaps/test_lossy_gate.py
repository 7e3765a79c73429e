"""Lossy rungs over HTTP: a harmless one is kept, a harmful one refused, by what the server answers.

Speeds come from twins on a virtual clock; quality is read from the same command line's twin through
its own HTTP routes (SGLang's /generate, llama.cpp's /completion, a chat), as from a real server.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec
import pytest

from ridgeline.optimize.cost import MachinePrice
from ridgeline.optimize.environment import Deployment, Environment, ServedTexts, Simulator
from ridgeline.optimize.job import OptimizeJob
from ridgeline.optimize.ladder import Ladder, load_default_ladder, parse_ladder
from ridgeline.optimize.quality.served_text import TextSource
from ridgeline.optimize.result import LadderResult
from ridgeline.optimize.search import optimize
from ridgeline.records import Slo
from ridgeline.workflows.evaluate.heldout_text import heldout_pieces
from tests.handicaps.virtual_servers import Traffic, VirtualDeployment, VirtualServers
from tests.twin.test_twin_dialects import TwinScorer, twin_of_command

HARMLESS, HARMFUL = "harmless", "harmful"
LADDER = """
[[rung]]
id = "{id}"
title = "{id}"
technique = ""
variants = [{{ server_flags = {flags} }}]
honesty = "lossy"
term = "bytes"
risk = 1
complexity = 0
why = "Fewer bytes."
hurts_when = "Quality drops."
"""
SGLANG = {
    HARMLESS: '{ "--quantization" = "fp8" }',
    HARMFUL: '{ "--quantization" = "bitsandbytes" }',
}
LLAMA = {
    HARMLESS: '{ "@llama-3.1-8b" = "llama-3.1-8b-Q8_0.gguf" }',
    HARMFUL: '{ "@llama-3.1-8b" = "llama-3.1-8b-Q4_K_M.gguf" }',
}


@dataclass
class ScoredServers(VirtualServers):
    """Twins whose quality is read over HTTP. `kind`: the dialect of the scorer."""

    kind: str = "sglang"
    stack: ExitStack = field(default_factory=ExitStack)
    scorers: dict[str, TwinScorer] = field(default_factory=dict)

    def environment(self, simulator: Simulator | None = None) -> Environment:
        texts = ServedTexts(texts=heldout_pieces(200, 256), questions=(), source_of=self.source_of)
        return msgspec.structs.replace(super().environment(simulator), heldout=(), served=texts)

    def source_of(self, deployment: Deployment) -> TextSource:
        assert isinstance(deployment, VirtualDeployment)
        words = self.recipe.flags.words(deployment.settings, self.start)
        command = self.recipe.command.text(words)
        if command not in self.scorers:
            chat_only = self.kind == "chat"
            self.scorers[command] = self.stack.enter_context(
                twin_of_command(command, self.kind, chat_only=chat_only)
            )
        return self.scorers[command]


def ladder_of(flags: dict[str, str]) -> Ladder:
    text = "".join(LADDER.format(id=name, flags=table) for name, table in flags.items())
    return Ladder(parse_ladder(text).rungs, load_default_ladder().weights)


def searched(servers: ScoredServers, ladder: Ladder) -> LadderResult:
    job = OptimizeJob(
        settings=servers.start,
        workload="equal requests",
        slo=Slo.parse("ttft:2000 tpot:100"),
        objective="goodput",
        budget_s=1500.0,
        price=MachinePrice(),
    )
    with servers.stack:
        return asyncio.run(optimize(job, servers.environment(), ladder, clock=servers.clock))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "kind", "flags", "rungs"),
    [
        ("sglang", "sglang", "--max-running-requests 4", SGLANG),
        ("llama-server", "llama-server", "--parallel 4", LLAMA),
        ("sglang", "chat", "--max-running-requests 4", SGLANG),
    ],
    ids=["sglang", "llama.cpp", "chat-only"],
)
def test_harmful_lossy_rung_is_refused_and_harmless_one_kept(
    server: str, kind: str, flags: str, rungs: dict[str, str]
) -> None:
    servers = ScoredServers(
        server, flags, traffic=Traffic(prompt=96, output=32), device="l4", kind=kind
    )
    result = searched(servers, ladder_of(rungs))
    verdicts = {trial.rung: trial for trial in result.trials}
    assert verdicts[HARMLESS].verdict == "kept", verdicts[HARMLESS].reason
    assert verdicts[HARMFUL].verdict == "quality failed", verdicts[HARMFUL].reason
    quality = verdicts[HARMLESS].quality
    assert quality is not None and quality.verdict == "pass"
    assert {check.name for check in quality.checks} >= {"KL mean (nats)", "greedy agreement"}
    assert result.total is not None and result.total.low > 1.2
