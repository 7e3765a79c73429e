"""`kill -9` at any instant loses nothing and does nothing twice."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from ridgeline.serve.batch.store import BatchStore
from tests.house.code import ROOT
from tests.serve.batch.helpers import created, now, results

NAMES = [f"line-{i}" for i in range(400)]
MOST_KILLS = 12


def killed_after(store: Path, seconds: float) -> bool:
    """Run the worker process and kill it; False if it ended before."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("killed.py")), str(store)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None and process.stdout.readline() == b"open\n"
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True
    finally:
        process.stdout.close()
    assert code == 0
    return False


@pytest.mark.slow
def test_killed_worker_loses_and_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "batches.sqlite"
    store = BatchStore(path)
    batch = created(store, *NAMES)
    store.close()
    random.seed(time.time_ns())
    num_kills = 0
    while num_kills < MOST_KILLS and killed_after(path, random.uniform(0.0, 0.15)):
        num_kills += 1
    while killed_after(path, 60):
        raise AssertionError("the rest was not answered")
    assert num_kills >= 3, "the work ended before it was interrupted"
    store = BatchStore(path)
    batch = now(store, batch)
    assert batch.status == "completed"
    found = results(store, batch)
    assert Counter(line["custom_id"] for _, line in found) == Counter(NAMES)
    num_good = sum(kind == "output" for kind, _ in found)
    assert (batch.total, batch.completed, batch.failed) == (400, num_good, 400 - num_good)
    assert num_good == sum(place % 7 != 0 for place in range(400))
    assert (batch.prompt_tokens, batch.completion_tokens) == (400, 800)
    store.close()
