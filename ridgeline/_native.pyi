"""Types of the native module (native/*.cpp)."""

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
        stride_token: int,
        stride_head: int,
        num_bytes: int,
    ) -> None: ...

class AttentionPlan:
    """The runs of one step; every block id is checked once, here."""

    def __init__(
        self,
        row_start: list[int],
        computed: list[int],
        table_start: list[int],
        table: list[int],
        num_blocks: int,
        block_size: int,
    ) -> None: ...
    @property
    def num_rows(self) -> int: ...

class Int8Weight:
    """A packed INT8 weight with its scales and bias."""

    def __init__(self, weight: int, scales: int, bias: int, num_out: int, num_in: int) -> None: ...
    @property
    def nbytes(self) -> int: ...

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
def linear_int8(
    weight: Int8Weight,
    x: int,
    x_stride: int,
    num_rows: int,
    out: int,
    row_scale: float,
    num_threads: int,
    isa: str,
) -> None: ...
def read_rates(
    total_bytes: int, num_threads: int, repetitions: int, min_s: float
) -> list[tuple[float, float]]: ...
def multiply_rates(
    kind: str, num_threads: int, repetitions: int, min_s: float
) -> list[tuple[float, float]]: ...
def multiply_kinds() -> list[str]: ...
