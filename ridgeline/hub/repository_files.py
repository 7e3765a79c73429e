"""Which files of a Hugging Face repository make up a model, and where its snapshot is cached."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path, PurePosixPath

from ridgeline.errors import DECODE_ERRORS, BadModel
from ridgeline.hub.names import HubModel

INDEX = "model.safetensors.index.json"
CONFIG_FILES = ("config.json", "quantize_config.json", "hf_quant_config.json")
"""What says a model's sizes and the format of its weights."""
_PLAIN = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_FOLDERS = ("additional_chat_templates/", "1_Pooling/")
_NOT_A_MODEL = re.compile(r"(^|[._-])(mmproj|imatrix)([._-]|$)", re.IGNORECASE)
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_LISTED = 12


def select_files(names: Iterable[str], model: HubModel) -> list[str]:
    """The files to download, the small ones first and the weights last.

    A repository of safetensors needs its top-level weights, JSON and tokenizer files; one of GGUF
    files needs the one whose name holds the quantisation, or all parts of it. Raises BadModel where
    nothing fits, or several files do.
    """
    listed = sorted(names)
    if model.quantization is not None:
        return select_gguf(listed, model)
    top = [name for name in listed if "/" not in name or name.startswith(_FOLDERS)]
    weights = [name for name in top if name.endswith(".safetensors")]
    if any(
        name.startswith("model") for name in weights
    ):  # else Mistral's own layout, a second copy
        weights = [name for name in weights if not name.startswith("consolidated")]
    if not weights:
        if any(name.endswith(".gguf") for name in listed):
            return select_gguf(listed, model)
        raise _no_weights(listed, model)
    return [*(name for name in top if name.endswith(_PLAIN)), *weights]


def select_gguf(names: Sequence[str], model: HubModel) -> list[str]:
    """The GGUF file of the quantisation, or the parts of a split one, in order."""
    models: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if name.endswith(".gguf") and not _NOT_A_MODEL.search(PurePosixPath(name).name):
            models[_PART.sub(".gguf", name)].append(name)
    wanted = [name for name in models if _has_quantization(name, model.quantization)]
    if len(wanted) == 1:
        return models[wanted[0]]
    problem = "holds several GGUF files" if wanted else "holds no GGUF file of this quantisation"
    shown = wanted or list(models)
    raise BadModel(
        f"the repository {model.repo} {problem}",
        value=model.quantization,
        limit=_short_list([PurePosixPath(name).name for name in shown]) or "it holds no GGUF file",
        fix=f"add a part of the file's name, as {model.repo}:Q4_K_M",
    )


def _has_quantization(name: str, quantization: str | None) -> bool:
    if quantization is None:
        return True
    stem = PurePosixPath(name).name.removesuffix(".gguf")
    pattern = rf"(^|[._-]){re.escape(quantization)}([._-]|$)"
    return re.search(pattern, stem, re.IGNORECASE) is not None


def _no_weights(names: Collection[str], model: HubModel) -> BadModel:
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickled:
        return BadModel(
            f"the repository {model.repo} holds only pickled weights, which can run code when "
            "loaded",
            value=pickled[0],
            limit="weights in safetensors or GGUF",
            fix="choose a repository, or a revision (@refs/pr/N), with safetensors",
        )
    return BadModel(
        f"the repository {model.repo} holds no weights of a language model",
        value=_short_list(sorted(names)) or "no file",
        limit="weights in safetensors or GGUF",
        fix="check the name: a data set, an adapter or a pipeline is not a model",
    )


def _short_list(names: Sequence[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f", … {more} more" if more > 0 else "")


def repository_folder(repo: str) -> Path:
    """The folder of a repository in the cache of the Hugging Face Hub ($HF_HOME, $HF_HUB_CACHE)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def cached_commit(model: HubModel) -> str | None:
    """The commit that the model's revision was when it was last downloaded; None if never."""
    revision = model.revision or "main"
    if _COMMIT.fullmatch(revision):
        return revision
    ref = repository_folder(model.repo) / "refs" / revision
    try:
        return ref.read_text("utf-8", "replace").strip()
    except OSError:
        return None


def cached_repositories() -> list[tuple[str, str | None]]:
    """(repository, revision) of every model in the hub's cache; None is the main branch."""
    from huggingface_hub import constants

    found: list[tuple[str, str | None]] = []
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        refs = [path for path in (folder / "refs").rglob("*") if path.is_file()]
        commits = {path.read_text("utf-8", "replace").strip() for path in refs}
        revisions = sorted(path.relative_to(folder / "refs").as_posix() for path in refs)
        found += [(repo, None if revision == "main" else revision) for revision in revisions]
        snapshots = sorted(path.name for path in (folder / "snapshots").glob("*"))
        found += [(repo, commit) for commit in snapshots if commit not in commits]
    return found


def snapshot_files(model: HubModel) -> list[str]:
    """Names of the files of a model's repository that are cached."""
    commit = cached_commit(model)
    if commit is None:
        return []
    folder = repository_folder(model.repo) / "snapshots" / commit
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def find_snapshot(model: HubModel) -> Path | None:
    """The cached directory of a model, or its GGUF file; None where a part of it is missing."""
    try:
        selected = select_files(snapshot_files(model), model)
    except BadModel:
        return None
    folder = repository_folder(model.repo) / "snapshots" / str(cached_commit(model))
    if not _is_complete(folder, selected):
        return None
    return folder / selected[0] if selected[0].endswith(".gguf") else folder


def _is_complete(folder: Path, selected: Sequence[str]) -> bool:
    """Whether every part of a split model is there. The weights are downloaded last.

    Raises BadModel if the index, which lists the parts, cannot be read.
    """
    part = _PART.search(selected[0])
    if part is not None:
        return len(selected) == int(part[2])
    if INDEX not in selected:
        return True
    try:
        index = json.loads((folder / INDEX).read_text("utf-8"))
        return set(index["weight_map"].values()) <= set(selected)
    except (OSError, LookupError, TypeError, AttributeError, *DECODE_ERRORS) as error:
        raise BadModel(
            "the index of a model's weights cannot be read",
            value=f"{folder / INDEX}: {error}",
            fix="delete it and download the model again",
        ) from None
