#!/bin/sh
# Builds the image of the Dockerfile by buildah, without a registry of images, and runs it.
#   scripts/check_image.sh DIRECTORY [FLAG OF buildah bud]...
# The base is Debian 12 by debootstrap, whose Python is 3.11. Needs root, and Debian's packages buildah and debootstrap.
set -eu
mkdir -p "$1"
WORK=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
for tool in buildah debootstrap curl; do
  command -v $tool >/dev/null || { echo "$tool is missing: apt-get install buildah debootstrap curl" >&2; exit 1; }
done
export BUILDAH_ISOLATION=chroot
build() { buildah --root "$WORK/root" --runroot "$WORK/runroot" --storage-driver vfs "$@"; }

BASE=localhost/ridgeline-base
if ! build inspect --type image $BASE >/dev/null 2>&1; then
  debootstrap --variant=minbase --include=python3,python3-venv,python-is-python3,python3-dev,ca-certificates \
    bookworm "$WORK/base"
  rm -rf "$WORK"/base/var/cache/apt/archives/*.deb "$WORK"/base/var/lib/apt/lists/*  # as images of Python are
  container=$(build from scratch)
  build copy --quiet "$container" "$WORK/base" /
  build commit --quiet "$container" $BASE
  build rm "$container"
  rm -rf "$WORK/base"
fi
build bud --format docker --build-arg PYTHON_IMAGE=$BASE "$@" --tag localhost/ridgeline .

container=$(build from localhost/ridgeline)
# To end `buildah run` does not end what it started.
stop() {
  inside sh -c 'kill "$(cat /cache/pid)"' 2>/dev/null || true
  wait || true
  build rm "$container" >/dev/null
}
trap stop EXIT
inside() { build run "$container" -- "$@"; }
[ "$(inside id -u)" = 10001 ] || { echo "the image runs as another user than 10001" >&2; exit 1; }
inside ridgeline --version
inside ridgeline doctor
PORT=18431
inside sh -c "echo \$\$ > /cache/pid; exec ridgeline serve demo --port $PORT" &
for _ in $(seq 240); do
  curl --silent --fail http://127.0.0.1:$PORT/ready >/dev/null && break
  sleep 1
done
ANSWER=$(curl --silent --fail http://127.0.0.1:$PORT/v1/completions \
  --data '{"model": "demo", "prompt": "def add(a, b):", "max_tokens": 16, "temperature": 0}')
echo "$ANSWER"
case $ANSWER in *'"completion_tokens":16'*) ;; *) echo "the answer is not of 16 tokens" >&2; exit 1 ;; esac
KB=$(inside du -skx / 2>/dev/null | cut -f1) || true
echo "the image holds $((KB / 1000)) MB"
[ "$KB" -le 1200000 ] || { echo "that is more than 1,200 MB" >&2; exit 1; }
KB=$(inside du -sk /opt/ridgeline | cut -f1)
echo "Python's environment takes $((KB / 1000)) MB on top of the base"
[ "$KB" -le 950000 ] || { echo "that is more than 950 MB" >&2; exit 1; }
