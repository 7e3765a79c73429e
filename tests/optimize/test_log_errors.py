"""Why a server did not start is found in its log."""

import pytest

from ridgeline.optimize.drivers.log_errors import MAX_CHARS, last_error

TRACEBACK = """INFO 11-28 14:30:01 starting
Traceback (most recent call last):
  File "config.py", line 3, in load
KeyError: 'first'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "serve.py", line 9, in main
    raise ImportError(
{last}
[rank0] W1128 14:30 resources were not released
"""


CASES = {
    TRACEBACK.format(last="ImportError: drafts need X"): "ImportError: drafts need X",
    "(Core pid=7) torch.OutOfMemoryError: no memory.\nbye\n": "torch.OutOfMemoryError: no memory.",
    "ValueError: no head\nRuntimeError: Engine failed. See root cause above. {}\n": (
        "ValueError: no head"
    ),
    "RuntimeError: no head\nDeadError: Stopped. See stack trace (above) for more.\n": (
        "RuntimeError: no head"
    ),
    "WARNING OSError: [Errno 24] raise ulimit\nserve: error: bad --y\nINFO bye": (
        "serve: error: bad --y"
    ),
    "ERROR KeyError: 'a'\nERROR   File \"x.py\", line 3\nERROR     raise self._made() from e": (
        "KeyError: 'a'"
    ),
    "usage: serve [-h]\nserve: error: unknown --x\n": "serve: error: unknown --x",
    "llama_model_load: error loading model: bad magic\nexiting\n": (
        "llama_model_load: error loading model: bad magic"
    ),
    "\x1b[31mFATAL\x1b[0m no device\n\n": "FATAL no device",
    "loading\nstopped by the scheduler\n\n": "stopped by the scheduler",
    "": "",
    " \n\n": "",
}


@pytest.mark.parametrize(("log", "error"), CASES.items(), ids=range(len(CASES)))
def test_last_error_of_a_log(log: str, error: str) -> None:
    assert last_error(log) == error


def test_long_error_is_cut() -> None:
    found = last_error("ValueError: " + "x" * 2 * MAX_CHARS)
    assert len(found) == MAX_CHARS and found.endswith("…")
