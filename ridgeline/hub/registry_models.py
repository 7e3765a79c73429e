"""The models that Ridgeline downloads from the package registry, by name."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import PurePosixPath

import msgspec


class RegistryModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model file inside a wheel. `wheel` pins its version, `sha256` the content of `member`.

    `temperature` and `top_p` are the sampling that its publisher recommends for chats.
    """

    name: str
    title: str
    quantization: str
    licence: str
    wheel: str
    member: str
    temperature: float
    top_p: float
    num_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return PurePosixPath(self.member).name


@cache
def registry_models() -> Mapping[str, RegistryModel]:
    """Every model of registry_models.toml."""
    text = files("ridgeline.hub").joinpath("registry_models.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)
    return {
        name: msgspec.convert({"name": name, **row}, RegistryModel) for name, row in rows.items()
    }
