"""`ridgeline`: the entry point, and the one place where errors become lines and exit codes.

0 done · 1 something broke · 2 the user can mend it (one line: what, value, limit, fix) · 130
interrupted. A traceback appears only with `--debug`, which may stand before or after the
subcommand.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Sequence

from ridgeline.errors import RidgelineError, UserError

PROMISE = re.compile(r"(ttft|tpot|e2el?|error|attainment):\S")
MENDABLE, BROKEN, INTERRUPTED = 2, 1, 130
_OF_A_PATH = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
}
SPINS = (
    "1000"  # turns of a waiting OpenMP thread before it sleeps; libgomp's own default is 300,000
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    # A thread that spins at a barrier takes the core from the one it waits for, whenever anything
    # else runs: the event loop of this very process, or a neighbour. libgomp reads this when torch
    # is imported, hence here. Measured in notes/experiments/2026-11-26-tried-linear-kernels.md.
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    given = list(sys.argv[1:] if argv is None else argv)
    args, debug = _without_debug(given)
    try:
        return _run(_with_whole_promises(args))
    except BaseException as error:
        if debug and not isinstance(error, KeyboardInterrupt):
            raise
        return _explain(error)


def _run(args: list[str]) -> int:
    from ridgeline.cli.app import app

    try:
        app(args, prog_name="ridgeline")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def _without_debug(args: list[str]) -> tuple[list[str], bool]:
    """The arguments without `--debug` (but not past a `--`), and whether it was there."""
    end = args.index("--") if "--" in args else len(args)
    head = [arg for arg in args[:end] if arg != "--debug"]
    return head + args[end:], len(head) < end


def _with_whole_promises(args: list[str]) -> list[str]:
    """`--goodput ttft:200 tpot:50`, vLLM's way to write it, as one value."""
    joined: list[str] = []
    for arg in args:
        follows = joined[-2:-1] == ["--goodput"] or (joined and joined[-1].startswith("--goodput="))
        if follows and PROMISE.match(arg):
            joined[-1] += f" {arg}"
        else:
            joined.append(arg)
    return joined


def _explain(error: BaseException) -> int:
    """Print the error as one line; returns its exit code."""
    if isinstance(error, KeyboardInterrupt):
        _say("interrupted")
        return INTERRUPTED
    if isinstance(error, UserError):
        _say(str(error))
        return MENDABLE
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" at {error.filename}" if error.filename else ""
        _say(f"the disk is full{where}; fix: free some space, or write elsewhere")
        return BROKEN
    if isinstance(error, OSError) and error.filename and error.errno in _OF_A_PATH:
        _say(
            f"the path cannot be used; got {str(error.filename)!r}: {error.strerror}; "
            "fix: name one that exists and may be read or written"
        )
        return MENDABLE
    if isinstance(error, RidgelineError):
        _say(str(error))
    elif isinstance(error, OSError):
        _say(f"the system refused: {error}")
    else:
        _say(f"internal error: {type(error).__name__}: {error} (--debug shows the traceback)")
    return BROKEN


def _say(message: str) -> None:
    """The message in red on stderr: one line, unless it holds a table (a memory budget)."""
    from rich.console import Console

    Console(stderr=True, highlight=False).print(
        f"ridgeline: {message.strip()}", style="red", markup=False, soft_wrap=True
    )
