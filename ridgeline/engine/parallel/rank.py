"""One rank's model: its part of the weights, its KV cache and its attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.base import Attend, Attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.full import self_attention
from ridgeline.engine.attention.kv_format import kv_format
from ridgeline.engine.dtype import DTYPES
from ridgeline.engine.execution.batch import make_batch
from ridgeline.engine.execution.threads import StepThreads
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.parallel.builder import load_rank
from ridgeline.engine.parallel.exchange.base import Collectives
from ridgeline.engine.parallel.layers.context import ContextAttention
from ridgeline.engine.parallel.layers.linears import head_logits
from ridgeline.engine.parallel.messages import Command, ComputeLogits, RankConfig, RunStep
from ridgeline.engine.scheduler.plan import StepPlan, draft_paths
from ridgeline.modelspec.cost.kv_layout import kv_layout


@dataclass(frozen=True)
class RankModel:
    """The decoder, cache and attention of one rank, and how wide every place's head is."""

    config: RankConfig
    decoder: Decoder
    cache: KvCache
    attention: Attention
    collectives: Collectives

    @property
    def head_widths(self) -> list[int]:
        """Outputs of the LM head at each place of the first stage."""
        shard = self.config.shard
        return [
            len(shard.vocabulary(self.config.spec, place))
            for place in range(shard.sizes.stage_ranks)
        ]


def load_model(config: RankConfig, collectives: Collectives) -> RankModel:
    """Load one rank's part of the model. Raises BadModel, CannotRun."""
    shard, spec, dtype = config.shard, config.spec, DTYPES[config.dtype]
    decoder = load_rank(config, collectives)
    layers = shard.layers(spec)
    # On a GPU, rows of padding write to one block that no sequence has.
    num_padding_blocks = 0 if config.device == "cpu" else 1
    cache = KvCache.allocate(
        decoder.spec,
        config.num_blocks + num_padding_blocks,
        config.rank_block_size,
        dtype,
        config.device,
        kv_format(config.kv_cache_dtype, config.device),
        config.max_num_seqs,
        kv_layout(spec).only(range(layers.start, layers.stop)),
    )
    if shard.sizes.context > 1:
        attention: Attention = ContextAttention(
            decoder.spec, cache, collectives=collectives.context, divides_rows=config.divides_rows
        )
    else:
        attention = build_attention(config.attention_backend, decoder.spec, cache)
    return RankModel(config, decoder, cache, attention, collectives)


class RankWorker:
    """Executes rank 0's commands on the model of another rank."""

    def __init__(self, model: RankModel) -> None:
        self.model, config = model, model.config
        self.threads = StepThreads(config.num_threads, config.num_threads_decode)
        decoder = model.decoder
        like = torch.empty(0, dtype=decoder.compute_dtype, device=decoder.device)
        self._self_attention: Callable[[Sequence[int]], Attend] = self_attention(
            decoder.spec, like, model.cache, model.attention
        )

    @torch.inference_mode()
    def execute(self, command: Command) -> None:
        """Take part in what the command computes."""
        if isinstance(command, RunStep):
            self._run(command.plan)
        elif isinstance(command, ComputeLogits):
            self._head(command.num_rows)
        else:
            self._score(command.tokens)

    def _run(self, plan: StepPlan) -> None:
        model = self.model
        model.cache.copy_blocks(plan.copies)
        if not plan.runs:
            return
        runs = list(chain.from_iterable(map(draft_paths, plan.runs)))
        batch = make_batch(runs, model.decoder.device)
        self.threads.begin(len(batch.tokens_T))
        attend = model.attention.prepare(runs)
        model.decoder.hidden(batch.tokens_T, batch.positions_T, batch.end, attend)

    def _head(self, num_rows: int) -> None:
        model = self.model
        decoder = model.decoder
        if not model.config.shard.is_first_stage:
            return
        x_SC = torch.empty(
            (num_rows, decoder.spec.hidden_size), dtype=decoder.compute_dtype, device=decoder.device
        )
        head_logits(decoder.lm_head, x_SC, model.head_widths, model.collectives)

    def _score(self, tokens: Sequence[int]) -> None:
        decoder, num = self.model.decoder, len(tokens)
        tokens_T = torch.tensor(tokens, device=decoder.device)
        positions_T = torch.arange(num, device=decoder.device)
        decoder.hidden(tokens_T, positions_T, num, self._self_attention(tokens))
