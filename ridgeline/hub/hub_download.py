"""Download a model from the Hugging Face Hub, through huggingface-hub.

The library's environment variables apply: HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE. It
resumes files that were downloaded in part. Of weights, the hub publishes the SHA-256, which is
compared here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING, Any, TypeVar

import ridgeline
from ridgeline.errors import BadModel, DownloadFailed, UserError
from ridgeline.hub.names import HubModel
from ridgeline.hub.progress import DownloadMeter
from ridgeline.hub.repository_files import (
    CONFIG_FILES,
    cached_commit,
    repository_folder,
    select_files,
    snapshot_files,
)
from ridgeline.hub.verify import sha256_of
from ridgeline.records.progress import Message, Observer

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

T = TypeVar("T")
_PARALLEL_FILES = 4
_MAX_WAITS = 3
_MAX_WAIT_S = 60.0
_RETRY_HINT = "run the command again: it continues where it stopped"


def download_repository(
    model: HubModel, observer: Observer, *, sleep: Callable[[float], None] = time.sleep
) -> Path:
    """Fetch what is missing of a model's files; returns its directory, or its GGUF file.

    Raises BadModel if the repository holds no model that Ridgeline reads, DownloadFailed if the
    hub refuses, cannot be reached, or sends something else than it announced.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="ridgeline", library_version=ridgeline.__version__)
    with _translate_errors(model, api.endpoint):
        info = _retry_when_limited(
            partial(api.model_info, model.repo, revision=model.revision, files_metadata=True),
            observer,
            sleep,
        )
        files = {sibling.rfilename: sibling for sibling in info.siblings or ()}
        selected = [files[name] for name in select_files(files, model)]
        paths = _fetch_files(api, model, info, selected, observer)
    _remember_revision(model, str(info.sha))
    first = paths[0]
    return first if first.suffix == ".gguf" else first.parent


def download_config(
    model: HubModel, observer: Observer, *, sleep: Callable[[float], None] = time.sleep
) -> Path:
    """The folder with a model's config.json, of which no weights are downloaded.

    Also fetches the files in which older tools keep the format of quantised weights. Raises
    BadModel if the repository has no config.json, DownloadFailed as `download_repository` does.
    """
    from huggingface_hub import HfApi

    if "config.json" in snapshot_files(model):
        return repository_folder(model.repo) / "snapshots" / str(cached_commit(model))
    api = HfApi(library_name="ridgeline", library_version=ridgeline.__version__)
    with _translate_errors(model, api.endpoint):
        info = _retry_when_limited(
            partial(api.model_info, model.repo, revision=model.revision, files_metadata=True),
            observer,
            sleep,
        )
        files = {sibling.rfilename: sibling for sibling in info.siblings or ()}
        if "config.json" not in files:
            raise BadModel(
                f"the repository {model.repo} has no config.json",
                value=str(model),
                fix=f"run ridgeline pull {model} to read the model's files",
            )
        selected = [files[name] for name in CONFIG_FILES if name in files]
        paths = _fetch_files(api, model, info, selected, observer)
    _remember_revision(model, str(info.sha))
    return paths[0].parent


def _retry_when_limited(
    call: Callable[[], T], observer: Observer, sleep: Callable[[float], None]
) -> T:
    """The result of `call`, which is repeated when the hub says that it is called too often."""
    from huggingface_hub.errors import HfHubHTTPError

    for _ in range(_MAX_WAITS):
        try:
            return call()
        except HfHubHTTPError as error:
            wait_s = _retry_after_s(error)
            if wait_s is None or wait_s > _MAX_WAIT_S:
                raise
            observer(Message(text=f"the hub limits requests: waiting {wait_s:.0f} s"))
            sleep(wait_s)
    return call()


def _retry_after_s(error: Any) -> float | None:
    """How long to wait after status 429; None for another status."""
    if error.response is None or error.response.status_code != 429:
        return None
    stated = error.response.headers.get("Retry-After", "")
    return float(stated) if re.fullmatch(r"\d+(\.\d+)?", stated) else 5.0


def _fetch_files(
    api: HfApi,
    model: HubModel,
    info: ModelInfo,
    selected: Sequence[RepoSibling],
    observer: Observer,
) -> list[Path]:
    """The paths of the selected files in the cache, once all of them are there and verified."""
    snapshot = repository_folder(model.repo) / "snapshots" / str(info.sha)
    missing = [file for file in selected if not (snapshot / file.rfilename).exists()]
    if missing:
        total = sum(file.size or 0 for file in missing)
        _check_space(total, snapshot)
        detail = f"{len(missing)} files, {total / 1e6:,.0f} MB, commit {str(info.sha)[:12]}"
        meter = DownloadMeter(observer, f"downloading {model.repo}", total, detail)
        small = [file for file in missing if file.lfs is None]
        large = [file for file in missing if file.lfs is not None]
        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            for group in (small, large):  # large last: where they are, the small ones are as well
                fetch = partial(_fetch_file, api, model, str(info.sha), meter)
                list(pool.map(fetch, group))
        meter.finish()
    return [snapshot / file.rfilename for file in selected]


def _fetch_file(
    api: HfApi, model: HubModel, commit: str, meter: DownloadMeter, file: RepoSibling
) -> None:
    path = Path(
        api.hf_hub_download(
            model.repo, file.rfilename, revision=commit, tqdm_class=_meter_class(meter)
        )
    )
    expected = file.lfs.sha256 if file.lfs is not None else None
    if expected is None:
        return
    found = sha256_of(path)
    if found != expected:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise DownloadFailed(
            f"{file.rfilename} of {model.repo} arrived damaged, and was removed",
            value=f"SHA-256 {found}",
            limit=expected,
            fix="run the command again; if it repeats, check the proxy or mirror in between",
        )


def _meter_class(meter: DownloadMeter) -> type[Any]:
    """A class with tqdm's interface, as huggingface-hub calls it, that counts on `meter`."""

    class MeterBar:
        def __init__(self, *args: object, initial: int = 0, **options: object) -> None:
            meter.skip(initial)

        def update(self, count: float = 1) -> None:
            meter.add(int(count))

        def __enter__(self) -> MeterBar:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def __getattr__(self, name: str) -> Callable[..., None]:
            if name.startswith(("_", "update_")):
                raise AttributeError(name)
            return lambda *args, **options: None  # refresh, close, set_description, …

    return MeterBar


def _check_space(num_bytes: int, folder: Path) -> None:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = disk_usage(existing).free
    if num_bytes > free:
        raise DownloadFailed(
            "the model does not fit on the disk",
            value=f"{num_bytes / 1e9:,.1f} GB",
            limit=f"{free / 1e9:,.1f} GB free at {existing}",
            fix="free some space, or set HF_HOME to a folder on another disk",
        )


def _remember_revision(model: HubModel, commit: str) -> None:
    """Note which commit the branch is, as huggingface-hub does, to find it without the network."""
    refs = repository_folder(model.repo) / "refs" / (model.revision or "main")
    if model.revision == commit:
        return
    refs.parent.mkdir(parents=True, exist_ok=True)
    partial_file = refs.with_name(f".{refs.name}.partial")
    partial_file.write_text(commit, "utf-8")
    partial_file.replace(refs)


@contextmanager
def _translate_errors(model: HubModel, endpoint: str) -> Iterator[None]:
    """Turns the errors of huggingface-hub into errors that say what to do."""
    import httpx2
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        yield
    except UserError:
        raise
    except HFValidationError as error:
        raise BadModel("not the name of a repository", value=model.repo, fix=str(error)) from None
    except HfHubHTTPError as error:
        raise _refusal(model, endpoint, error) from None
    except OfflineModeIsEnabled:
        raise DownloadFailed(
            "the model is not in the cache, and HF_HUB_OFFLINE forbids to download it",
            value=str(model),
            fix=f"unset HF_HUB_OFFLINE, and run ridgeline pull {model}",
        ) from None
    except (httpx2.TransportError, LocalEntryNotFoundError, OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.filename:
            raise  # a local file: the disk is full, or a folder cannot be written
        raise DownloadFailed(
            f"the download of {model.repo} failed",
            value=_first_line(error),
            limit=f"from {endpoint}",
            fix=f"check the network, or HF_ENDPOINT and the proxy; {_RETRY_HINT}",
        ) from None


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    text = str(cause).strip() or type(cause).__name__
    return text.splitlines()[0][:200]


def _refusal(model: HubModel, endpoint: str, error: Any) -> UserError:
    """The error for an HTTP status of the hub."""
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page, status = f"{endpoint}/{model.repo}", error.response.status_code
    if isinstance(error, GatedRepoError):
        return DownloadFailed(
            "the model is gated: its owner asks for an agreement first",
            value=model.repo,
            fix=f"accept the terms at {page}, then set HF_TOKEN to a token that may read it",
        )
    if isinstance(error, RevisionNotFoundError):
        return BadModel(
            f"the repository {model.repo} has no such revision",
            value=model.revision,
            limit="a branch, a tag or a full commit hash",
            fix=f"see {page}/commits, or leave @{model.revision} out",
        )
    if isinstance(error, RepositoryNotFoundError):
        return BadModel(
            "there is no such model directory, and no such public repository on the hub",
            value=model.repo,
            limit=endpoint,
            fix="check the name; for a private repository set HF_TOKEN",
        )
    if status in (401, 403):
        return DownloadFailed(
            "the hub does not let this token read the repository",
            value=f"{model.repo}: status {status}",
            fix=f"set HF_TOKEN to a token that may read {page}",
        )
    if status == 429:
        after = f"{_retry_after_s(error):.0f} s"
        return DownloadFailed(
            "the hub limits how often it may be called",
            value=f"{model.repo}: status 429",
            limit=f"again in {after}",
            fix="wait, or set HF_TOKEN, which has higher limits; then run the command again",
        )
    return DownloadFailed(
        f"the hub could not deliver {model.repo}",
        value=f"status {status}",
        limit=f"from {endpoint}",
        fix=_RETRY_HINT,
    )
