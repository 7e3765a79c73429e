"""Mutated files of every format: read, or refused with one sentence, in bounded time and memory."""

from __future__ import annotations

import os
import random
import resource
from pathlib import Path

import pytest

from tests.fuzz.run import CORPUS, fault_of, random_input
from tests.fuzz.targets import TARGETS

NUM_RUNS = int(os.environ.get("FUZZ_RUNS", "60"))
FIRST_RUN = int(os.environ.get("FUZZ_SEED", "0"))
MAX_GROWTH_KB = 600 << 10
FILES = [file for target in TARGETS for file in sorted((CORPUS / target).glob("*"))]


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_can_be_read(target: str) -> None:
    faults = [fault_of(target, data) for data in TARGETS[target].seeds()]
    assert faults == [None] * len(faults)


@pytest.mark.parametrize("target", TARGETS)
def test_mutated_files_are_read_or_refused_with_a_sentence(target: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(FIRST_RUN, FIRST_RUN + NUM_RUNS):
        data = random_input(target, random.Random(f"{target}/0/{number}"))
        fault = fault_of(target, data)
        assert fault is None, f"{target} #{number}: {fault!r} for {data[:300]!r}"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KB


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.name}")
def test_files_that_once_failed_stay_mended(file: Path) -> None:
    fault = fault_of(file.parent.name, file.read_bytes())
    assert fault is None, repr(fault)
