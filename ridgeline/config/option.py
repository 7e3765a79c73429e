"""One declaration per option, from which everything else about it is derived.

A section is a frozen struct whose fields are its options. A field's type, default and `About` say
all there is to say about the option:

    class Settings(Section):
        max_num_seqs: Annotated[int | None, About("Sequences that run at once.", unit=COUNT)] = None

From this row come the command-line flag, the key in `ridgeline.toml`, the environment variable,
the checks (made when the struct is built) and the reference page.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from ridgeline.config.units import Range, Unit
from ridgeline.errors import DECODE_ERRORS, BadInput

PathUse = Literal["input", "file", "folder"]
"""What a path names: something read, a file written, a folder written into."""


class About(msgspec.Struct, frozen=True):
    """What a field's type and default do not say about an option.

    `unset`: what happens without a value, where the default alone does not say it. `flag`: the
    flag's name where it is not the field's; "" for an option without a flag. `env`: the environment
    variable where it is not derived from the name. `ambient`: False where only the command line may
    set it. `negative`: the flag that switches a bool off; "" derives `--no-…` where the default is
    on. `panel`: a heading in help texts that begins with this option and goes on to the next one.
    `old_names`: flags of other versions and tools, refused with a hint.
    `parse` makes the value of a text, or raises BadInput. `words`: a pattern; further words that
    match it belong to the value, as in `--slo ttft:200 tpot:50`; of a positional option, the last,
    all further words do.
    """

    help: str
    unit: Unit | None = None
    range: Range | None = None
    unset: str = ""
    flag: str | None = None
    short: str = ""
    old_names: tuple[str, ...] = ()
    negative: str = ""
    metavar: str = ""
    panel: str = ""
    positional: bool = False
    required: bool = False
    path: PathUse | None = None
    env: str | None = None
    ambient: bool = True
    parse: Callable[[str], Any] | None = None
    words: str = ""
    since: str = "0.1"

    def but(self, **changes: Any) -> About:
        """The same, with changes: how a command narrows a shared description."""
        return msgspec.structs.replace(self, **changes)


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the option table: a field of a section, its type taken apart.

    `type` is the bare type of one value (without `| None`; of the items where `multiple`).
    """

    name: str
    type: Any
    choices: tuple[Any, ...]
    multiple: bool
    default: Any
    about: About
    panel: str
    table: str
    prefix: str

    @property
    def has_flag(self) -> bool:
        return not self.about.positional and self.about.flag != ""

    @property
    def on_command_line(self) -> bool:
        """Whether the command line can set it: as a flag or as an argument."""
        return self.has_flag or self.about.positional

    @property
    def flag(self) -> str:
        """`--max-num-seqs`; the placeholder (`MODEL`) of a positional argument."""
        if self.about.positional:
            return self.about.metavar or self.name.upper()
        return "--" + (self.about.flag or self.name).replace("_", "-")

    @property
    def old_flags(self) -> tuple[str, ...]:
        """Flags that it had before, or that other tools call it: refused with the present one."""
        return tuple(f"--{name}" for name in self.about.old_names)

    @property
    def negative(self) -> str:
        """The flag that switches a bool off, or ""."""
        if self.type is not bool or not self.has_flag:
            return ""
        if self.about.negative:
            return self.about.negative
        return "--no-" + self.flag[2:] if self.default else ""

    @property
    def key(self) -> str:
        """Its key in the section's TOML table, or "" where a file cannot set it."""
        ambient = self.about.ambient and not self.about.positional and self.table
        return self.name if ambient else ""

    @property
    def env(self) -> str:
        """Its environment variable, or ""."""
        if self.about.env is not None:
            return self.about.env
        return f"RIDGELINE_{self.prefix}{self.name}".upper() if self.key else ""

    @property
    def range(self) -> Range | None:
        if self.about.range is not None:
            return self.about.range
        return self.about.unit.range if self.about.unit is not None else None

    @property
    def metavar(self) -> str:
        """The placeholder for its value; "" for a switch."""
        if self.type is bool:
            return ""
        if self.about.metavar:
            return self.about.metavar
        if self.choices:
            return "|".join(map(str, self.choices))
        if self.about.unit is not None:
            return self.about.unit.metavar
        if self.about.path is not None:
            return "FOLDER" if self.about.path == "folder" else "FILE"
        return "JSON" if _is_struct(self.type) else "TEXT"

    @property
    def default_text(self) -> str:
        """The default as a reader wants to see it; "" where there is nothing to say."""
        if self.about.unset or self.default is None or self.default is msgspec.NODEFAULT:
            return self.about.unset
        if self.type is bool:
            return "on" if self.default else "off"
        if self.default in ("", ()):
            return self.about.unset
        unit = self.about.unit
        if unit is not None and unit.metavar == "BYTES":
            return _binary(self.default)
        if unit is not None and unit.metavar == "PORT":
            return str(self.default)
        if isinstance(self.default, float) and self.default == int(self.default):
            return f"{int(self.default):,}"
        return f"{self.default:,}" if isinstance(self.default, int) else str(self.default)

    def read(self, value: Any, where: str) -> Any:
        """The value that text, or a value of a TOML file, stands for. `where` names it in errors.

        Raises BadInput for a value of the wrong form or out of range.
        """
        if self.multiple:
            items = value if isinstance(value, list | tuple) else (value,)
            return tuple(self.read_one(item, where) for item in items)
        return self.read_one(value, where)

    def check(self, value: Any, where: str) -> None:
        """BadInput for a number that is out of range."""
        if value is None or self.range is None or not isinstance(value, int | float):
            return
        if not self.range.contains(value):
            bound = self.range.bound_of(value)
            raise BadInput(f"{where} is out of range", value=value, limit=bound)

    def read_one(self, value: Any, where: str) -> Any:
        """As `read`; one item of an option that may be repeated."""
        if self.type is bool:
            return _read_bool(value, where)
        if self.choices:
            return self._read_choice(value, where)
        if self.about.parse is not None:
            return self.about.parse(value) if isinstance(value, str) else value
        if _is_struct(self.type):
            return _read_struct(value, self.type, where)
        if self.about.unit is not None:
            number = self._read_number(value, where, self.about.unit)
            self.check(number, where)
            return number
        if not isinstance(value, str | Path):
            raise BadInput(f"{where} must be text", value=value)
        return Path(value) if self.type is Path else str(value)

    def _read_choice(self, value: Any, where: str) -> Any:
        for choice in self.choices:
            if str(value) == str(choice) and not isinstance(value, bool):
                return choice
        raise BadInput(
            f"{where} has no such choice", value=value, limit=", ".join(map(str, self.choices))
        )

    def _read_number(self, value: Any, where: str, unit: Unit) -> float:
        number: object = value
        if isinstance(value, str):
            try:
                number = unit.parse(value)
            except ValueError:
                number = None
        if isinstance(number, int | float) and not isinstance(number, bool):
            if self.type is float:
                return float(number)
            if isinstance(number, int) or number.is_integer():
                return int(number)
        raise BadInput(f"{where} must be {unit.form}", value=value)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of options: one table of `ridgeline.toml`, one or more panels of a command's help.

    `title` heads its first panel; `table` is the TOML table ("" for none); `prefix` stands in the
    names of its environment variables, which are otherwise `RIDGELINE_` and the option's name.
    """

    title: ClassVar[str] = "Options"
    table: ClassVar[str] = ""
    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for option in _ranged(type(self)):
            option.check(getattr(self, option.name), option.flag)


@cache
def options_of(section: type[Section]) -> dict[str, Option]:
    """The section's rows by name, in the order of their declaration."""
    hints = get_type_hints(section, include_extras=True)
    rows: dict[str, Option] = {}
    panel = section.title
    for field in msgspec.structs.fields(section):
        about = _about(hints[field.name])
        if about is None:
            continue
        panel = about.panel or panel
        kind, choices, multiple = _taken_apart(hints[field.name])
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        rows[field.name] = Option(
            name=field.name,
            type=kind,
            choices=choices,
            multiple=multiple,
            default=default,
            about=about,
            panel=panel,
            table=section.table,
            prefix=section.prefix,
        )
    return rows


@cache
def _ranged(section: type[Section]) -> tuple[Option, ...]:
    return tuple(option for option in options_of(section).values() if option.range is not None)


def _about(hint: Any) -> About | None:
    metadata = getattr(hint, "__metadata__", ())
    return next((item for item in metadata if isinstance(item, About)), None)


def _taken_apart(hint: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """(type of one value, choices, whether there may be several) of an annotation."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, UnionType):
        hint = next(arg for arg in get_args(hint) if arg is not NoneType)
    if get_origin(hint) is tuple:
        kind, choices, _ = _taken_apart(get_args(hint)[0])
        return kind, choices, True
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return type(choices[0]), choices, False
    return hint, (), False


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _read_bool(value: Any, where: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in words:
        return words[value.strip().lower()]
    raise BadInput(f"{where} must be true or false", value=value)


def _read_struct(value: Any, kind: type[msgspec.Struct], where: str) -> msgspec.Struct:
    """From a JSON object, or from a table of a TOML file."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except DECODE_ERRORS as error:
            raise BadInput(f"{where} is not valid JSON", value=value, fix=str(error)) from None
    if not isinstance(value, dict):
        raise BadInput(f"{where} must be a JSON object", value=value, fix='write {"key": value}')
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise BadInput(f"{where}: {error}", limit=f"known keys: {known}") from None


def _binary(value: int) -> str:
    for scale, suffix in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= scale and value % scale == 0:
            return f"{value // scale} {suffix}"
    return f"{value:,} B"
