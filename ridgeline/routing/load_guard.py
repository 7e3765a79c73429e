"""When affinity yields to balance: thresholds of the SGLang gateway, by default."""

from __future__ import annotations

BALANCE_ABS, BALANCE_REL = 64, 1.5


def is_much_busier(
    load: int, least: int, balance_abs: int = BALANCE_ABS, balance_rel: float = BALANCE_REL
) -> bool:
    """Whether a replica has over `balance_abs` requests and `balance_rel` times more in flight
    than the least loaded one."""
    return load - least > balance_abs and load > balance_rel * least
