"""Types of the native module (native/*.cpp)."""

from collections.abc import Mapping, Sequence

class PagedKv:
    """Where one layer's keys and values stand, checked against its memory."""

    def __init__(
        self,
        k: int,
        v: int,
        kind: str,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        stride_block: int,
        stride_head: int,
        num_bytes: int,
    ) -> None: ...

class AttentionPlan:
    """The runs of one step: (first position, number of rows, block table). Every block id is
    checked once, here."""

    def __init__(
        self,
        runs: list[tuple[int, int, tuple[int, ...]]],
        num_blocks: int,
        block_size: int,
    ) -> None: ...
    @property
    def num_rows(self) -> int: ...

class LinearWeight:
    """A packed weight; borrows memory that the caller keeps alive (native/linear.h)."""

    def __init__(
        self,
        kind: str,
        num_out: int,
        num_in: int,
        group: int,
        lines: int,
        num_bytes: int,
        scales: int,
        num_scales: int,
        zeros: int,
        factors: int,
        num_factors: int,
        bias: int,
        num_bias: int,
        mins: int,
        steps: int,
        min_steps: int,
        span: int,
    ) -> None: ...
    digits: int
    @property
    def address(self) -> int: ...

class QuantRows:
    """Rows of int8 with a scale per row and group, ready for every linear of that group."""

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

class FusedFrame:
    """Memory of one decoder's steps (native/segment.h)."""

    def __init__(self, isa: str) -> None: ...
    def begin(self, num_rows: int, tokens: int, positions: int, out: int) -> None: ...
    def set_turns(self, rope: int, table: int, num_positions: int, rotated: int) -> None: ...
    def profile(self, on: bool) -> dict[str, float]: ...
    @property
    def nbytes(self) -> int: ...

class FusedSegment:
    """Operators run in one parallel region; borrows all memory that it is told of."""

    def __init__(self) -> None: ...
    def embed(
        self, table: int, is_bf16: bool, num_tokens: int, width: int, scale: float
    ) -> None: ...
    def embed_packed(self, table: int, scale: float) -> None: ...
    def rows(
        self,
        source: str,
        width: int,
        add_branch: bool,
        branch_gain: int,
        norm: bool,
        gain: int,
        eps: float,
        for_weight: int,
        to: str,
    ) -> None: ...
    def linear(self, weight: int, to: str, gated: bool) -> None: ...
    def gated_linear(self, weight: int, activation: str, for_weight: int) -> None: ...
    def gate(self, weight: int, activation: str, for_weight: int) -> None: ...
    def turn(
        self,
        num_q: int,
        num_k: int,
        num_heads: int,
        head_dim: int,
        rope: int,
        q_gain: int,
        k_gain: int,
        eps: float,
        kv: PagedKv | None,
        isa: str,
    ) -> None: ...
    def attend(
        self, kv: PagedKv, num_heads: int, scale: float, window: int, softcap: float, isa: str
    ) -> None: ...
    def mark(self, name: str) -> None: ...
    def run_step(self, frame: FusedFrame, plan: AttentionPlan, num_threads: int) -> None: ...
    def experts(
        self,
        router: int,
        gate_up: list[int],
        down: list[int],
        width: int,
        num_chosen: int,
        norm_topk: bool,
        activation: str,
    ) -> None: ...
    def run(self, frame: FusedFrame, attended: int, heads: int, num_threads: int) -> None: ...

def first_largest(
    x: int,
    stride: int,
    num_rows: int,
    width: int,
    num_threads: int,
    isa: str,
) -> list[int]: ...
def draw(
    x: int,
    stride: int,
    num_rows: int,
    width: int,
    asked: list[float],
    num_threads: int,
    isa: str,
) -> list[int]: ...
def lesson(
    level: str,
    x: int,
    g: int,
    u: int,
    h: int,
    num_rows: int,
    num_in: int,
    num_out: int,
    num_threads: int,
    isa: str,
) -> None: ...
def choose_ranges(
    weight: int,
    error: int,
    others: int,
    moment: int,
    scales: int,
    zeros: int,
    chosen: int,
    stride: int,
    num_rows: int,
    size: int,
    num_scales: int,
    num_zeros: int,
    low: float,
    high: float,
    num_threads: int,
    isa: str,
) -> None: ...
def best_isa() -> str: ...
def write_kv(
    plan: AttentionPlan,
    kv: PagedKv,
    new_kv: int,
    stride_row: int,
    stride_kind: int,
    stride_head: int,
    isa: str,
) -> None: ...
def attend(
    plan: AttentionPlan,
    kv: PagedKv,
    q: int,
    q_stride_row: int,
    q_stride_head: int,
    num_heads: int,
    out: int,
    scale: float,
    window: int,
    softcap: float,
    num_threads: int,
    isa: str,
) -> None: ...
def linear_isa(isa: str) -> str: ...
def linear_isas() -> str: ...
def packed_bytes(kind: str, num_out: int, num_in: int, group: int) -> int: ...
def pack_lines(
    kind: str, q: int, num_out: int, num_in: int, group: int, lines: int, num_bytes: int
) -> None: ...
def quantise_rows(
    kind: str,
    x: int,
    x_stride: int,
    num_rows: int,
    num_in: int,
    group: int,
    row_scale: float,
    num_threads: int,
    isa: str,
) -> QuantRows: ...
def linear_quantised(
    weight: LinearWeight, rows: QuantRows, out: int, out_stride: int, num_threads: int, isa: str
) -> None: ...
def linear(
    weight: LinearWeight,
    x: int,
    x_stride: int,
    num_rows: int,
    out: int,
    out_stride: int,
    row_scale: float,
    num_threads: int,
    isa: str,
) -> None: ...
def unpack_rows(weight: LinearWeight, rows: int, num_rows: int, out: int) -> None: ...
def read_rates(
    total_bytes: int, num_threads: int, repetitions: int, min_s: float
) -> list[tuple[float, float]]: ...
def multiply_rates(
    kind: str, num_threads: int, repetitions: int, min_s: float
) -> list[tuple[float, float]]: ...
def multiply_kinds() -> list[str]: ...
def send_each(pairs: tuple[tuple[int, bytes], ...]) -> list[int]: ...

class Errand:
    def add(self, text: str, at_s: float) -> bool: ...
    def go(self) -> None: ...
    def end(self) -> bytes: ...
    def seen(self) -> tuple[int, float, float]: ...
    @property
    def is_stuck(self) -> bool: ...

class Courier:
    def __init__(
        self, now_s: float, publish_bounds: list[float], gap_bounds: list[float]
    ) -> None: ...
    def take(
        self, descriptor: int, opening: bytes, head: bytes, tail: bytes, interval: int
    ) -> Errand: ...
    def drain(self) -> tuple[int, list[int], float, list[int], float]: ...
    @property
    def pipe(self) -> int: ...

class PromptLookup:
    def __init__(self, shortest: int, longest: int) -> None: ...
    def look(
        self, seq_id: int, tokens: Sequence[int], num_prompt: int, most: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None: ...
    def forget(self, seq_id: int) -> None: ...
    @property
    def num_texts(self) -> int: ...

class Seat:
    def __init__(self, num_read: int) -> None: ...
    @property
    def length(self) -> int: ...

class Automaton:
    def __init__(self) -> None: ...
    def feed(self, tokens: Sequence[int]) -> None: ...
    def look(
        self,
        seat: Seat,
        tokens: Sequence[int],
        warm: int,
        longer_than: int,
        most: int,
        stop: int,
    ) -> tuple[int, tuple[int, ...]] | None: ...
    @property
    def num_states(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...

class GuessRecord:
    def __init__(
        self,
        priors: Sequence[float],
        prior_weight: float,
        like_others: float,
        fade_all: float,
        fade_own: float,
        least_chance: float,
    ) -> None: ...
    def chance(self, kind: int) -> float: ...
    def counts(self, kind: int) -> tuple[float, float]: ...
    def survivals(self, seq_id: int, kinds: Sequence[int]) -> list[float]: ...
    def keep(
        self, seq_id: int, num_known: int, tokens: Sequence[int], kinds: Sequence[int]
    ) -> None: ...
    def compare(self, seq_id: int, tokens: Sequence[int]) -> None: ...
    def forget(self, seq_id: int) -> None: ...
    @property
    def num_pending(self) -> int: ...

def choose_depths(
    survivals: Sequence[Sequence[float]],
    computed: Sequence[bool],
    num_free: int,
    num_runs: int,
    plain_s: float,
    line: Sequence[float],
    drafting_s: Sequence[float],
    least_chance: float,
) -> tuple[list[int], float, float]: ...

class StepCurve:
    def __init__(
        self, grid: Mapping[int, Sequence[tuple[int, float]]], knots: Sequence[int]
    ) -> None: ...
    def seconds(self, runs: int, rows: int) -> float: ...
    def line(self, runs: int, first: int, count: int) -> list[float]: ...
    def learn(self, runs: int, rows: int, seconds: float) -> None: ...
    def has_seen(self, runs: int) -> bool: ...
