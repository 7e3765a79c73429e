"""Settings of the whole suite: a separate cache, threads of parallel workers, and the fast tier.

The fast tier (`-m "not slow"`, part of `make check`) leaves out the tests marked `slow` and those
in `slow_tests.txt`, which `make slow-tests` writes from measured times. A file whose every test is
slow is listed by its path, or says `pytestmark = pytest.mark.slow`: the fast tier does not import
it.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from ridgeline.paths import default_cache_dir

ROOT = Path(__file__).parents[1]
SLOW_TESTS = frozenset((ROOT / "tests" / "slow_tests.txt").read_text("utf-8").split())
SLOW_FILE = "pytestmark = pytest.mark.slow\n"
FAST_CPU_S = 10.0
"""CPU seconds that a test of the fast tier may take.

Tests above 0.02 s on a quiet machine are listed as slow; the margin is for new tests, slower
machines, and house rules that parse the whole source.
"""

USER_CACHE = "RIDGELINE_TEST_USER_CACHE"
"""Where tests find models that `make install` downloaded, which they read and never change."""

if (
    "RIDGELINE_TEST_DEVICE" not in os.environ
):  # before triton is imported: its interpreter, on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test downloads: a model that is not here is an error

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IS_WORKER:  # before torch is imported: the workers share the CPUs among them
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# An example may take its time where other workers compute at the same time.
settings.register_profile("ridgeline", deadline=None)
settings.load_profile("ridgeline")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the tests out of the user's cache, and let all workers collect sets in one order."""
    if not IS_WORKER:  # what workers inherit
        os.environ.setdefault("PYTHONHASHSEED", str(os.getpid()))
        os.environ[USER_CACHE] = str(default_cache_dir())
        os.environ["RIDGELINE_CACHE"] = tempfile.mkdtemp(prefix="ridgeline-test-cache-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not IS_WORKER:
        shutil.rmtree(os.environ.pop("RIDGELINE_CACHE"), ignore_errors=True)


def _is_fast_tier(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr") == "not slow")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of slow files in the fast tier."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if not is_test or not _is_fast_tier(config):
        return None
    listed = collection_path.relative_to(ROOT).as_posix() in SLOW_TESTS
    return listed or SLOW_FILE in collection_path.read_text("utf-8") or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the listed tests as slow."""
    for item in items:
        if item.nodeid.partition("[")[0] in SLOW_TESTS:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test of the fast tier that needs too much CPU time to be in it."""
    before = _cpu_s()
    yield
    used = _cpu_s() - before
    if _is_fast_tier(item.config) and used > FAST_CPU_S:
        pytest.fail(f"took {used:.1f} s of CPU time, above {FAST_CPU_S} s: mark it slow")


def _cpu_s() -> float:
    """CPU time of this process and of the children that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run in a test is called disturbed, whatever else this machine does."""
    monkeypatch.setattr("ridgeline.measure.monitors.machine_load.LoadMeter.read", _unknown_load)


def _unknown_load(_: object) -> None:
    return None
