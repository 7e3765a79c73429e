"""The entry point of `ridgeline`: errors become messages and exit codes here.

0 success · 1 failure · 2 an error that the user can correct (one line: what is wrong, the value,
the limit, the fix) · 3 inconclusive (compare) · 130 interrupted · 143 terminated. `--debug`, before
or after the command, shows the traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from ridgeline.errors import Inconclusive, RidgelineError, UserError

if TYPE_CHECKING:
    import click

SUCCESS, FAILURE, USER_ERROR, UNDECIDED, INTERRUPTED = 0, 1, 2, 3, 130
TERMINATED = 128 + signal.SIGTERM
_PATH_ERRORS = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
}
COMPLETION_VARIABLE = "_RIDGELINE_COMPLETE"  # set by the script of `ridgeline completion`
SPIN_COUNT = "1000"  # iterations of a waiting OpenMP thread before it sleeps (libgomp: 300,000)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    # A thread that spins at a barrier takes the core from the thread it waits for, whenever
    # anything else runs: this process's event loop, or a neighbour. libgomp reads the variable
    # when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    args = list(sys.argv[1:] if argv is None else argv)
    debug = is_debug(args)
    try:
        with _terminable():
            code = _run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _discard_output()
        return SUCCESS
    except BaseException as error:
        if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
            return SUCCESS  # rich ends the program so, and has discarded the output
        if debug and isinstance(error, Exception):
            raise
        return _report(error)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the program as an exception does: what a command started is stopped.

    Servers replace the handler by their own, which drains.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL or not _is_main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _terminate(number: int, frame: object) -> NoReturn:
    raise SystemExit(TERMINATED)


def is_debug(args: Sequence[str]) -> bool:
    """Whether `--debug` stands anywhere before a `--`."""
    end = args.index("--") if "--" in args else len(args)
    return "--debug" in args[:end]


def _run(args: list[str]) -> int:
    import click

    from ridgeline.cli.app import app

    completion = os.environ.get(COMPLETION_VARIABLE)
    if completion:
        from click.shell_completion import shell_complete

        return shell_complete(app, {}, "ridgeline", COMPLETION_VARIABLE, completion)
    try:
        with app.make_context("ridgeline", args) as context:
            code: int | None = app.invoke(context)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return USER_ERROR
    except click.UsageError as error:
        raise _usage_error(error, args) from None
    return code or SUCCESS


def _usage_error(error: click.UsageError, args: Sequence[str]) -> UserError:
    """What click found wrong with the command line, in the style of our errors."""
    from ridgeline.cli import other_names

    message = " ".join(error.message.split()).rstrip(".")
    message = message[:1].lower() + message[1:]
    near = getattr(error, "possibilities", None) or []
    command = other_names.COMMANDS.get(getattr(error, "command_name", ""))
    near = near if command is None else [command]
    path = error.ctx.command_path if error.ctx is not None else "ridgeline"
    fix = other_names.option_fix(error, args)
    if fix is not None:
        return UserError(message, fix=f"{fix}; {path} --help lists the options")
    address = re.fullmatch(r"got unexpected extra argument \((https?://\S+)\)", message)
    if address is not None:
        return UserError(message, fix=f"for the address of a server, write --url {address[1]}")
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return UserError(
        message, fix=f"{meant}{path} --help lists them" if near else f"see {path} --help"
    )


def _discard_output() -> None:
    """The reader of stdout has closed it (`| head`): buffered output must not raise at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: BaseException) -> int:
    """Print the error as one line; returns its exit code."""
    if isinstance(error, KeyboardInterrupt):
        _print_error("interrupted")
        return INTERRUPTED
    if isinstance(error, SystemExit):
        _print_error("terminated")
        return TERMINATED
    if isinstance(error, UserError):
        _print_error(str(error))
        return UNDECIDED if isinstance(error, Inconclusive) else USER_ERROR
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" at {error.filename}" if error.filename else ""
        _print_error(f"the disk is full{where}; fix: free some space, or write elsewhere")
        return FAILURE
    if isinstance(error, OSError) and error.filename and error.errno in _PATH_ERRORS:
        _print_error(
            f"cannot use this path; got {str(error.filename)!r}: {error.strerror}; "
            "fix: name one that exists and can be read or written"
        )
        return USER_ERROR
    if isinstance(error, RidgelineError):
        _print_error(str(error))
    elif isinstance(error, OSError):
        _print_error(f"the operating system reported an error: {error}")
    else:
        _print_error(
            f"internal error: {type(error).__name__}: {error} (--debug shows the traceback)"
        )
    return FAILURE


def _print_error(message: str) -> None:
    """In red on stderr: one line, unless it contains a table (a memory budget)."""
    from rich.console import Console

    Console(stderr=True, highlight=False).print(
        f"ridgeline: {message.strip()}", style="red", markup=False, soft_wrap=True
    )
