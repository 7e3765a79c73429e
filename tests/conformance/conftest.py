"""Small models on few cores: more threads than one only wait for each other."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _x87_tags() -> int:
    """The tag word of the x87 registers: two bits each, 3 where it is empty."""
    environment = (ctypes.c_uint16 * 32)()
    ctypes.CDLL(None).fegetenv(environment)
    return environment[4]


@pytest.fixture(autouse=True)
def _leaves_the_x87_registers_empty() -> Iterator[None]:
    """Compilers may copy through MMX registers, which are the x87 ones under another name: what
    comes next on that thread (a norm in OpenBLAS) then finds no place and computes NaN."""
    yield
    if sys.platform == "linux" and platform.machine() == "x86_64":
        assert _x87_tags() == 0xFFFF
