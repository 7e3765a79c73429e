"""Fuzz the readers by hand, and keep what finds a fault.

python -m tests.fuzz.run --runs 20000 [--target gguf] [--seed 5]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ridgeline.errors import RidgelineError
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
MEMORY = Path("/dev/shm")
"""Folders are made there if it exists: removing one took 1 to 2 ms on a disk, more than a read."""
MAX_S = 5.0
"""Longest time that reading one small file may take, on a busy machine."""


class Hang(BaseException):
    """A reader does not end."""


def fault_of(target: str, data: bytes) -> BaseException | None:
    """What went wrong in reading `data`, apart from a refusal with a sentence."""
    in_memory = TARGETS[target].in_memory
    parent = MEMORY if os.access(MEMORY, os.W_OK) else None
    with nullcontext(os.devnull) if in_memory else _folder_in(parent) as folder:
        before = signal.signal(signal.SIGALRM, _raise_hang)
        signal.setitimer(signal.ITIMER_REAL, MAX_S)
        try:
            TARGETS[target].read(Path(folder), data)
        except RidgelineError as error:
            text = str(error)
            if len(text) > 8000 or "\n\n" in text:
                return AssertionError(f"not one clear sentence: {text[:300]!r}")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return error
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    return None


def _folder_in(parent: Path | None) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir=parent, prefix="fuzz-")


def _raise_hang(*_: Any) -> None:
    raise Hang(f"more than {MAX_S:g} s")


def random_input(target: str, rng: random.Random) -> bytes:
    return TARGETS[target].mutate(rng, rng.choice(TARGETS[target].seeds()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", choices=sorted(TARGETS))
    parser.add_argument("--runs", type=int, default=2000, help="of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="write new faults into the corpus")
    arguments = parser.parse_args()
    limit = 6 << 30
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    seen: set[tuple[str, str]] = set()
    for target in [arguments.target] if arguments.target else sorted(TARGETS):
        began_s = time.perf_counter()
        for number in range(arguments.runs):
            data = random_input(target, random.Random(f"{target}/{arguments.seed}/{number}"))
            error = fault_of(target, data)
            if error is None:
                continue
            frames = [
                f for f in traceback.extract_tb(error.__traceback__) if "ridgeline/" in f.filename
            ]
            where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
            if (where, type(error).__name__) not in seen:
                seen.add((where, type(error).__name__))
                print(f"{target} #{number} {where} {type(error).__name__}: {str(error)[:150]}")
                print(f"   {data[:120]!r}", flush=True)
                if arguments.keep:
                    digest = hashlib.sha256(data).hexdigest()[:12]
                    (CORPUS / target).mkdir(parents=True, exist_ok=True)
                    (CORPUS / target / digest).write_bytes(data)
        print(
            f"{target}: {arguments.runs} inputs, {time.perf_counter() - began_s:.1f} s", flush=True
        )
    sys.exit(bool(seen))


if __name__ == "__main__":
    main()
