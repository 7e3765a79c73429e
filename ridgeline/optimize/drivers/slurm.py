"""Submits a Slurm job for every configuration (`--slurm SCRIPT`).

The script is the user's, with `{flags}` on the server's command line and, where several jobs may
share a node, `{port}`. The address has `{node}` for the node that the job gets. Jobs carry the
comment `ridgeline`, and are cancelled when their configuration is not needed, when Ridgeline ends,
and by a script if it is killed.
"""

from __future__ import annotations

import random
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType

from ridgeline.errors import BadInput, CannotRun
from ridgeline.optimize.drivers.base import Report, Shell
from ridgeline.optimize.drivers.log_errors import last_error
from ridgeline.optimize.drivers.restore_script import RESTORE_SCRIPT, RestoreScript
from ridgeline.optimize.drivers.server_process import answers, models_url, replace_flags
from ridgeline.optimize.drivers.shell import run, sleep_unless_interrupted, uninterrupted
from ridgeline.optimize.external.server_flags import spell_out

POLL_S = 2.0
PORTS = (20_000, 32_000)
COMMENT = "ridgeline"
_STARTING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "SUSPENDED")
_RUNNING = ("RUNNING", "COMPLETING", "STOPPED", "SIGNALING")


class SlurmScript:
    """A job script with `{flags}`: the text of one configuration, and the server's command line."""

    def __init__(self, path: Path) -> None:
        try:
            self._text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput("cannot read the job script", value=str(path), fix=str(error)) from None
        joined = self._text.replace("\\\n", " ")
        lines = [line for line in joined.splitlines() if "{flags}" in line.split()]
        if len(lines) != 1:
            raise BadInput(
                "the job script needs {flags} once, as a word of the server's command line",
                value=str(path),
                limit=f"it has {len(lines)} such lines",
            )
        self._joined, self._line = joined, lines[0]
        try:
            line = spell_out(self._line, None)
            self._words = shlex.split(line, posix=False)  # keeps quotes and variables
        except ValueError as error:
            raise BadInput("the line with {flags} cannot be read", fix=str(error)) from None

    @property
    def has_port(self) -> bool:
        return "{port}" in self._text

    @property
    def command(self) -> str:
        """The server's command line, with `{flags}`."""
        return self._line.strip()

    def render(self, flags: Sequence[str], port: int | None) -> str:
        """The script with the flags; those that the line has already are replaced."""
        words, added = replace_flags(self._words, [shlex.quote(flag) for flag in flags])
        place = words.index("{flags}")
        line = " ".join([*words[:place], *added, *words[place + 1 :]])
        indent = self._line[: len(self._line) - len(self._line.lstrip())]
        text = self._joined.replace(self._line, indent + line)
        return text if port is None else text.replace("{port}", str(port))


class SlurmDriver:
    """A `Driver`: each configuration is a job."""

    def __init__(
        self,
        script: SlurmScript,
        url: str,
        timeout_s: float,
        folder: Path,
        report: Report,
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`env`: variables that sbatch hands on to the jobs."""
        self._env = env
        if script.has_port != ("{port}" in url):
            raise BadInput("{port} must be both in --url and in the job script, or in neither")
        self._script, self._url, self._timeout_s = script, url, timeout_s
        self._folder, self._report = folder, report
        self._restore = RestoreScript(folder / RESTORE_SCRIPT)
        self._jobs: list[str] = []

    @property
    def side_by_side(self) -> bool:
        return "{node}" in self._url or "{port}" in self._url

    def __enter__(self) -> SlurmDriver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for job in tuple(self._jobs):
            self.cancel(job)

    def configure(self, flags: Sequence[str], log: Path) -> SlurmJob:
        port = random.SystemRandom().randrange(*PORTS) if self._script.has_port else None
        file = log.with_suffix(".sbatch").absolute()
        file.write_text(self._script.render(flags, port), encoding="utf-8")
        url = self._url if port is None else self._url.replace("{port}", str(port))
        return SlurmJob(self, file, log.absolute(), url)

    def plan(self, flags: Sequence[str]) -> list[Shell]:
        log = self._folder / "server-1.log"
        words = submit_words(log.with_suffix(".sbatch"), log)
        return [Shell(words, tuple(self._env.items()))]

    def plan_restore(self) -> list[Shell]:
        return [Shell(("scancel", "JOB"))]

    def submit(self, file: Path, log: Path) -> str:
        """Submit a job and return its number. Raises CannotRun."""
        job = run(submit_words(file, log), env=self._env).strip().partition(";")[0]
        self._jobs.append(job)
        self._write_script()
        return job

    def cancel(self, job: str) -> None:
        with uninterrupted(self._report):
            try:
                run(("scancel", job))
            except CannotRun as error:
                self._report(f"job {job} could not be cancelled ({error}); run: scancel {job}")
                return
            if job in self._jobs:
                self._jobs.remove(job)
            self._write_script()

    def await_answer(self, job: str, log: Path, url: str) -> str:
        """The address of the job's server, once it answers. Raises CannotRun."""
        begun_s = time.monotonic()  # again when the job leaves the queue
        queued = True
        while True:
            state, reason, node = self._state(job)
            if state in _RUNNING:
                if queued:
                    queued, begun_s = False, time.monotonic()
                address = url.replace("{node}", node)
                if answers(models_url(address)):
                    return address
            elif state not in _STARTING:
                raise _failure(f"job {job} ended ({state or 'it left the queue'})", log)
            if time.monotonic() - begun_s > self._timeout_s:
                where = f"still {state} ({reason})" if queued else f"no answer at {address}"
                raise _failure(f"job {job}: {where} after {self._timeout_s:.0f} s", log)
            sleep_unless_interrupted(POLL_S)

    def _state(self, job: str) -> tuple[str, str, str]:
        """State, reason and first node of a job; empty once it has left the queue."""
        words = ("squeue", "--noheader", "--jobs", job, "--format", "%T|%r|%B")
        try:
            line = run(words).strip()
        except CannotRun as error:
            if "invalid job id" in str(error).lower():
                return "", "", ""
            return _STARTING[0], str(error), ""  # the controller may be out of reach for a moment
        state, _, rest = line.partition("|")
        reason, _, node = rest.partition("|")
        return state.strip(), reason.strip(), node.strip()

    def _write_script(self) -> None:
        if self._jobs:
            self._restore.write([shlex.join(("scancel", *self._jobs))])
        else:
            self._restore.remove()


class SlurmJob:
    """A `ServerHandle`: one configuration as a job."""

    def __init__(self, driver: SlurmDriver, file: Path, log: Path, url: str) -> None:
        self._driver, self._file, self._log = driver, file, log
        self._address, self.url, self.num_starts = url, url, 0
        self._job: str | None = None

    @property
    def is_up(self) -> bool:
        return self._job is not None and answers(models_url(self.url))

    def start(self) -> None:
        if self.is_up:
            return
        self.stop()
        self._job = self._driver.submit(self._file, self._log)
        try:
            self.url = self._driver.await_answer(self._job, self._log, self._address)
        except BaseException:
            self.stop()
            raise
        self.num_starts += 1

    def stop(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            self._driver.cancel(job)


def submit_words(file: Path, log: Path) -> tuple[str, ...]:
    """`sbatch` of a script; its output goes to `log`."""
    options = ("--parsable", "--comment", COMMENT, "--output", str(log), "--error", str(log))
    return ("sbatch", *options, str(file))


def _failure(what: str, log: Path) -> CannotRun:
    try:
        error = last_error(log.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        error = ""
    return CannotRun(f"the server did not come up: {what}", value=error or None, fix=f"see {log}")
