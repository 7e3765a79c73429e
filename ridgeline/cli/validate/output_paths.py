"""The output paths among a command's options, checked before the command runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ridgeline.config.commands import Command
from ridgeline.errors import BadInput
from ridgeline.report.output_paths import check_file, check_folder


def check_output_paths(command: Command, values: Mapping[str, Any]) -> None:
    """BadInput for the first output that cannot be written, that two options name, or that another
    option reads."""
    written: dict[Path, str] = {}
    inputs: list[str | Path] = []
    for name, option in command.options.items():
        value = values.get(name)
        if option.about.path not in ("file", "folder"):
            inputs += [value] if isinstance(value, str | Path) else []
        elif value is not None:
            check = check_file if option.about.path == "file" else check_folder
            check(value, option.flag)
            other = written.setdefault(value.resolve(), option.flag)
            if other != option.flag:
                raise BadInput(f"{option.flag} and {other} name the same path", value=str(value))
    for value in inputs:
        for path in existing_files(value):
            if path.resolve() in written:
                flag = written[path.resolve()]
                raise BadInput(
                    f"{flag} would overwrite an input", value=str(value), fix=f"name another {flag}"
                )


def existing_files(value: str | Path) -> Iterator[Path]:
    """The file that an option's value names: the value itself, or the part after the colon of a
    recorded workload, `sharegpt:FILE`."""
    text = str(value)
    for part in (text, text.partition(":")[2]):
        if part and "\0" not in part and len(part) < 4096 and Path(part).is_file():
            yield Path(part)
