"""What the name of a model stands for: files here, or a model to download."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ridgeline.errors import BadInput
from ridgeline.hub.registry_models import RegistryModel, registry_models

_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"
_HUB = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[\w./-]{{1,255}}))?(?::(?P<quantization>[\w.-]+))?"
)
_HUB_PREFIX = "hf:"
_FILE_SUFFIXES = (".gguf", ".json", ".safetensors", ".bin", ".pt", ".toml", ".jsonl")
_SHA256 = re.compile(r"sha256=([0-9a-f]{64})")


class HubModel(msgspec.Struct, frozen=True, kw_only=True):
    """A repository on the Hugging Face Hub.

    `revision`: a branch, tag or commit; None is the default branch. `quantization` selects a GGUF
    file, as Q4_K_M.
    """

    repo: str
    revision: str | None = None
    quantization: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        quantization = f":{self.quantization}" if self.quantization else ""
        return f"{_HUB_PREFIX if revision else ''}{self.repo}{revision}{quantization}"


class ModelUrl(msgspec.Struct, frozen=True, kw_only=True):
    """A GGUF file by its address. `sha256`: what its content must hash to, None if unknown."""

    url: str
    sha256: str | None = None

    @property
    def file_name(self) -> str:
        return urlsplit(self.url).path.rpartition("/")[2]

    def __str__(self) -> str:
        return self.url + (f"#sha256={self.sha256}" if self.sha256 else "")


RemoteModel = RegistryModel | HubModel | ModelUrl


def parse_remote(name: str) -> RemoteModel | None:
    """The model to download that `name` stands for; None where it names files here.

    `OWNER/REPO` means a repository only where no such file or directory exists; `hf:OWNER/REPO`
    always does. Raises BadInput for a malformed `hf:` name or address.
    """
    if name in registry_models():
        return registry_models()[name]
    if name.startswith(("http://", "https://")):
        return _parse_url(name)
    if name.startswith(_HUB_PREFIX):
        return _parse_hub(name)
    match = _HUB.fullmatch(name)
    if match is None or name.endswith(_FILE_SUFFIXES) or Path(name).exists():
        return None
    return HubModel(**match.groupdict())


def _parse_hub(name: str) -> HubModel:
    match = _HUB.fullmatch(name.removeprefix(_HUB_PREFIX))
    if match is None:
        raise BadInput(
            "not the name of a repository on the Hugging Face Hub",
            value=name,
            limit="hf:OWNER/REPO, with @REVISION and :QUANTISATION if wanted",
            fix="write it as hf:Qwen/Qwen3-0.6B or hf:OWNER/REPO@main:Q4_K_M",
        )
    return HubModel(**match.groupdict())


def _parse_url(name: str) -> ModelUrl:
    address, _, fragment = name.partition("#")
    match = _SHA256.fullmatch(fragment)
    url = ModelUrl(url=address, sha256=match[1] if match else None)
    if (fragment and match is None) or not url.file_name.endswith(".gguf"):
        raise BadInput(
            "the address of a model must end in .gguf",
            value=name,
            limit="https://HOST/PATH.gguf, with #sha256=HEX to check its content",
            fix=f"to measure a server, write --url {address}; a repository of safetensors files "
            "is hf:OWNER/REPO",
        )
    return url


def served_name(name: str) -> str:
    """The name by which clients know a model: OWNER/REPO without its prefix and revision."""
    remote = parse_remote(name)
    if isinstance(remote, HubModel):
        return str(msgspec.structs.replace(remote, revision=None))
    return remote.file_name if isinstance(remote, ModelUrl) else Path(name).name or name
