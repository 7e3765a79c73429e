#!/bin/sh
# Installs dist/'s wheel in a fresh environment that has no compiler, and runs it there.
#   scripts/check_dist.sh PYTHON
set -eu
PYTHON=$(command -v "$1")
cd "$(dirname "$0")/.."
WHEEL=$(ls "$PWD"/dist/ridgeline-*.whl)
case $WHEEL in *manylinux*) ;; *) echo "$WHEEL is not a manylinux wheel" >&2; exit 1 ;; esac
"$PYTHON" - "$WHEEL" <<'PY'
import sys, zipfile
names = zipfile.ZipFile(sys.argv[1]).namelist()
assert not [n for n in names if "libgomp" in n], "the wheel must not contain libgomp"
for needed in ("ridgeline/_native.pyi", "ridgeline/cli/main.py", "ridgeline/techniques.toml"):
    assert needed in names, f"{needed} is missing from the wheel"
PY
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
"$PYTHON" -m venv "$WORK/venv"
# Everything of the system but compilers and build tools.
mkdir "$WORK/bin"
for tool in /bin/* /usr/bin/*; do
  case $(basename "$tool") in
    *gcc* | *g++* | *clang* | cc | c++ | cpp | c89* | c99* | ld | ld.* | as | cmake | ninja | make | gmake) ;;
    *) ln -sf "$tool" "$WORK/bin/" ;;
  esac
done
PATH=$WORK/venv/bin:$WORK/bin
export PATH
for tool in gcc g++ cc c++ cmake; do
  if command -v $tool >/dev/null; then echo "$tool is still in PATH" >&2; exit 1; fi
done
cd "$WORK"
pip install --quiet --only-binary :all: "$WHEEL"
python -c "import ridgeline._native as n; print('native kernels:', n.linear_isas())"
ridgeline --version 2>/dev/null || python -c "import ridgeline; print('ridgeline', ridgeline.__version__)"
ridgeline doctor
echo "check_dist: $(basename "$WHEEL") installs without a compiler and runs"
