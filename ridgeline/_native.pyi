"""Ridgeline's native kernels and machine probes."""

from collections.abc import Mapping, Sequence
from typing import Any, overload


def best_isa() -> str:
    """
    The widest instruction set that this CPU runs: avx512, avx2 or portable.
    """

class PagedKv:
    """Where one layer's keys and values are, checked against its memory."""

    def __init__(self, k: int, v: int, kind: str, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, stride_block: int, stride_head: int, num_bytes: int) -> None: ...

class AttentionPlan:
    """
    The runs of one step: (first position, number of rows, block table) and, if it is not 0, the index of the table's first block. Block ids are checked here, once.
    """

    def __init__(self, runs: list[tuple[Any, ...]], num_blocks: int, block_size: int) -> None: ...

    @property
    def num_rows(self) -> int: ...

class ContextPlan:
    """
    Where the partials of a step's rows are if the chunks of keys are on several ranks.
    """

    def __init__(self, plan: AttentionPlan, window: int, num_ranks: int) -> None: ...

    def num_partials(self, rank: int) -> int:
        """The partials of all rows over a rank's chunks."""

def partial_width(kv: PagedKv, isa: str) -> int:
    """Floats of a partial of one head."""

def attend_partials(plan: AttentionPlan, context: ContextPlan, rank: int, kv: PagedKv, q: int, q_stride_row: int, q_stride_head: int, num_heads: int, partials: int, scale: float, softcap: float, num_threads: int, isa: str) -> None:
    """
    Partials [partials, heads, partial_width] of q over the chunks that a rank has.
    """

def merge_partials(plan: AttentionPlan, context: ContextPlan, kv: PagedKv, partials: Sequence[int], num_heads: int, out: int, first_row: int, end_row: int, num_threads: int, isa: str, sinks: int = 0) -> None:
    """
    Attention of some rows from the partials of all ranks, with the bits of `attend`.
    """

def attention_rounds(kind: str, isa: str) -> bool:
    """Whether queries and weights are rounded to the cache's format too."""

def write_kv(plan: AttentionPlan, kv: PagedKv, new_kv: int, stride_row: int, stride_kind: int, stride_head: int, isa: str) -> None:
    """Stores new keys and values [rows, 2, kv heads, head dim] in the cache."""

def attend(plan: AttentionPlan, kv: PagedKv, q: int, q_stride_row: int, q_stride_head: int, num_heads: int, out: int, scale: float, window: int, softcap: float, num_threads: int, isa: str, sinks: int = 0) -> None:
    """Attention of q [rows, heads, head dim] over the cache, to out."""

class Int4Kv:
    """Where one layer's groups in INT4 are, checked against its memory."""

    def __init__(self, k: int, v: int, num_blocks: int, num_kv_heads: int, head_dim: int, stride_block: int, stride_head: int, num_bytes: int) -> None: ...

class Int4Tables:
    """
    The blocks of each run's groups in INT4; block ids are checked here, once.
    """

    def __init__(self, runs: list[tuple[int, ...]], num_blocks: int) -> None: ...

def attend_int4(plan: AttentionPlan, recent: PagedKv, tables: Int4Tables, kv: Int4Kv, q: int, q_stride_row: int, q_stride_head: int, num_heads: int, out: int, scale: float, window: int, softcap: float, num_threads: int, isa: str, sinks: int = 0) -> None:
    """
    Attention of q [rows, heads, head dim] over groups in INT4 and recent rows in INT8, to out.
    """

def publish_counter(counter: int, value: int) -> None:
    """
    Set a counter in shared memory and wake the processes that wait for it.
    """

def wait_for_counters(first: int, count: int, stride: int, value: int, aborted: int, timeout_s: float) -> bool:
    """
    Wait until counters have reached a value; False if `aborted` is set or the time is over.
    """

class FusedFrame:
    """Memory of one decoder's steps (native/layer/segment.h)."""

    def __init__(self, isa: str) -> None: ...

    def begin(self, num_rows: int, tokens: int, positions: int, out: int) -> None: ...

    def set_rope(self, rope: int, table: int, num_positions: int, rotated: int) -> None:
        """
        Sets the cos and sin table [positions, 2, rotated] of a rotary embedding.
        """

    def profile(self, on: bool) -> dict[str, float]: ...

    @property
    def nbytes(self) -> int: ...

class FusedSegment:
    """
    Operators that run in one parallel region; borrows all memory it is given.
    """

    def __init__(self) -> None: ...

    def embed(self, table: int, is_bf16: bool, num_tokens: int, width: int, scale: float) -> None: ...

    def embed_packed(self, table: int, scale: float) -> None: ...

    def rows(self, source: str, width: int, add_branch: bool, branch_gain: int, norm: bool, gain: int, eps: float, for_weight: int, to: str, branch_scale: float = 1.0) -> None: ...

    def linear(self, weight: int, to: str, gated: bool) -> None: ...

    def gate_up(self, weight: int, activation: str, for_weight: int) -> None: ...

    def gate(self, weight: int, activation: str, for_weight: int) -> None: ...

    def rope(self, num_q: int, num_k: int, num_heads: int, head_dim: int, rope: int, q_gain: int, k_gain: int, eps: float, kv: PagedKv | None, isa: str, norm_rows: bool = False, interleaved: bool = False, group: int = 0) -> None: ...

    def attend(self, kv: PagedKv, num_heads: int, scale: float, window: int, softcap: float, isa: str, sinks: int = 0, group: int = 0) -> None: ...

    def mark(self, name: str) -> None: ...

    def experts(self, router: int, gate_up: Sequence[int], down: Sequence[int], width: int, num_chosen: int, norm_topk: bool, activation: str, router_bias: int = 0, correction: int = 0, sigmoid: bool = False, factor: float = 1.0) -> None: ...

    def add_shared_expert(self, router: int, width: int) -> None: ...

    @overload
    def run_step(self, frame: FusedFrame, plans: Sequence[AttentionPlan], num_threads: int) -> None: ...

    @overload
    def run_step(self, frame: FusedFrame, plan: AttentionPlan, num_threads: int) -> None: ...

    def run(self, frame: FusedFrame, attended: int, heads: int, num_threads: int) -> None: ...

class LinearWeight:
    """
    A packed weight; borrows memory that the caller keeps alive (native/linear/linear.h).
    """

    def __init__(self, kind: str, num_out: int, num_in: int, group: int, lines: int, num_bytes: int, scales: int, num_scales: int, zeros: int, factors: int, num_factors: int, bias: int, num_bias: int, mins: int, steps: int, min_steps: int, span: int) -> None: ...

    @property
    def digits(self) -> int:
        """
        As how many quantised rows each row of activations is multiplied (native/linear/linear.h).
        """

    @digits.setter
    def digits(self, arg: int, /) -> None: ...

    @property
    def address(self) -> int:
        """Of the PackedWeight, for segments: valid while this object lives."""

class QuantRows:
    """
    Rows of int8 with a scale per row and group, for every linear of that group.
    """

    @property
    def num_rows(self) -> int: ...

    @property
    def num_in(self) -> int: ...

    @property
    def group(self) -> int: ...

    @property
    def values(self) -> int: ...

    @property
    def scales(self) -> int: ...

    @property
    def sums(self) -> int: ...

def linear_isa(isa: str) -> str:
    """
    The variant of the linear kernels that `isa` selects here; 'auto' is the best one.
    """

def linear_isas() -> str:
    """The variants that this CPU runs, best first, comma-separated."""

def packed_bytes(kind: str, num_out: int, num_in: int, group: int) -> int: ...

def pack_lines(kind: str, q: int, num_out: int, num_in: int, group: int, lines: int, num_bytes: int) -> None: ...

def quantise_rows(kind: str, x: int, x_stride: int, num_rows: int, num_in: int, group: int, row_scale: float, num_threads: int, isa: str) -> QuantRows: ...

def linear_quantised(weight: LinearWeight, rows: QuantRows, out: int, out_stride: int, num_threads: int, isa: str) -> None: ...

def linear(weight: LinearWeight, x: int, x_stride: int, num_rows: int, out: int, out_stride: int, row_scale: float, num_threads: int, isa: str) -> None: ...

def unpack_rows(weight: LinearWeight, rows: int, num_rows: int, out: int) -> None: ...

def read_rates(total_bytes: int, num_threads: int, repetitions: int, min_s: float) -> list[tuple[float, float]]:
    """
    Streaming reads: one (bytes per second, CPU share) per repetition, all threads together.
    """

def multiply_rates(kind: str, num_threads: int, repetitions: int, min_s: float) -> list[tuple[float, float]]:
    """
    Multiply-adds in registers: one (operations per second, CPU share) per repetition.
    """

def multiply_kinds() -> list[str]:
    """The kinds that multiply_rates can measure on this CPU."""

def multiply_isa(kind: str) -> str:
    """
    The variant of the kernels whose multiply-add multiply_rates measures; "" where there is none.
    """

def search_scales(weight: int, error: int, others: int, moment: int, scales: int, zeros: int, chosen: int, stride: int, num_rows: int, size: int, num_scales: int, num_zeros: int, low: float, high: float, num_threads: int, isa: str) -> None:
    """
    Searches scales and zero-points of one group of each row (native/quantize/scale_search.h).
    """

def first_largest(x: int, stride: int, num_rows: int, width: int, num_threads: int, isa: str) -> list[int]:
    """
    The first largest of each row; -1 where a row has a NaN or its largest is not finite.
    """

def draw(x: int, stride: int, num_rows: int, width: int, params: Sequence[float], num_threads: int, isa: str) -> list[int]:
    """
    One token per row of logits; -1 where none can be chosen. `params` holds temperature, min_p, top_k, top_p and the uniform number of each row.
    """

def forbid(x: int, stride: int, width: int, rows: Sequence[int], words: int, num_words: int, num_threads: int) -> None:
    """
    Sets the logits of the named rows to minus infinity where a token's bit is 0; each row has `num_words` words of 32 bits.
    """

class PromptLookup:
    """What a sequence's own text says comes next."""

    def __init__(self, shortest: int, longest: int) -> None: ...

    def look(self, seq_id: int, tokens: Sequence[int], num_prompt: int, max_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """
        (tokens, kinds) of `max_tokens` tokens, or None where no n-gram that ends the text was in it before.
        """

    def forget(self, seq_id: int) -> None: ...

    @property
    def num_texts(self) -> int: ...

class SuffixMatch:
    """How far a sequence's tokens match an automaton."""

    def __init__(self, num_read: int) -> None: ...

    @property
    def length(self) -> int:
        """Tokens of the sequence's tail that occur in the text."""

class SuffixAutomaton:
    """A suffix automaton of a text."""

    def __init__(self) -> None: ...

    def feed(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text."""

    def look(self, match: SuffixMatch, tokens: Sequence[int], warm: int, longer_than: int, max_tokens: int, stop: int) -> tuple[int, tuple[int, ...]] | None:
        """
        (length, tokens): how long a tail of `tokens` occurs in the text and what followed it last; or None.
        """

    @property
    def num_states(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

class GuessRecord:
    """How often guesses were right, by kind."""

    def __init__(self, priors: Sequence[float], prior_weight: float, like_others: float, fade_all: float, fade_own: float, least_chance: float) -> None: ...

    def chance(self, kind: int) -> float: ...

    def counts(self, kind: int) -> tuple[float, float]: ...

    def survivals(self, seq_id: int, kinds: Sequence[int]) -> list[float]: ...

    def keep(self, seq_id: int, num_known: int, tokens: Sequence[int], kinds: Sequence[int]) -> None: ...

    def compare(self, seq_id: int, tokens: Sequence[int]) -> None: ...

    def forget(self, seq_id: int) -> None: ...

    @property
    def num_pending(self) -> int: ...

def choose_depths(survivals: Sequence[Sequence[float]], computed: Sequence[bool], num_free: int, num_runs: int, plain_s: float, line: Sequence[float], drafting_s: Sequence[float], least_chance: float) -> tuple[list[int], float, float]:
    """
    (depths, expected tokens, seconds): how many tokens to draft for each sequence.
    """

class StepCurve:
    """The time of a step by runs and rows, corrected as steps are measured."""

    def __init__(self, grid: Mapping[int, Sequence[tuple[int, float]]], knots: Sequence[int]) -> None: ...

    def seconds(self, runs: int, rows: int) -> float: ...

    def line(self, runs: int, first: int, count: int) -> list[float]: ...

    def learn(self, runs: int, rows: int, seconds: float) -> None: ...

    def has_seen(self, runs: int) -> bool: ...
