"""Coverage-guided fuzzing of the readers, with atheris (`pip install atheris`).

python -m tests.fuzz.guided gguf -runs=100000       options behind the target are libFuzzer's
"""

from __future__ import annotations

import random
import sys
from contextlib import suppress
from pathlib import Path

import atheris  # type: ignore[import-not-found]

READERS = (
    "ridgeline.modelspec",
    "ridgeline.engine.tokenization",
    "ridgeline.engine.checkpoints",
    "ridgeline.config",
    "ridgeline.serve.bodies",
    "ridgeline.serve.openai",
    "ridgeline.serve.anthropic",
    "ridgeline.serve.auth",
    "ridgeline.measure.client",
    "ridgeline.measure.results",
    "ridgeline.measure.workload",
    "ridgeline.plan",
    "ridgeline.hardware",
    "ridgeline.fleet.ray.fleet_file",
    "jinja2",
)
"""Only these are instrumented: the rest of what they import would take minutes."""

with atheris.instrument_imports(include=[*READERS]):
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401

    from tests.fuzz.run import fault_of
    from tests.fuzz.targets import TARGETS


def main() -> None:
    name, *options = sys.argv[1:]
    target = TARGETS[name]
    folder = Path("build/fuzz") / name  # inputs that reach new code are added here
    folder.mkdir(parents=True, exist_ok=True)
    for index, seed in enumerate(target.seeds()):
        (folder / f"seed-{index}").write_bytes(seed)

    def read(data: bytes) -> None:
        fault = fault_of(name, data)
        if fault is not None:
            raise fault

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            with suppress(ValueError, IndexError, KeyError, RecursionError):  # no longer its format
                return target.mutate(rng, data)[:max_size]
        return bytes(atheris.Mutate(data, max_size))

    atheris.Setup([sys.argv[0], str(folder), *options], read, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
