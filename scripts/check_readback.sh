#!/bin/sh
# scripts/readback.py, in llama.cpp's, transformers', GPTQModel's and vLLM's environments (made once:
# minutes).
#   check_readback.sh PYTHON FOLDER [--home DIR] [--use llama_cpp=DIR] [--use transformers=DIR]
#                     [--use gptqmodel=DIR] [--use vllm=DIR]
# PYTHON has ridgeline; FOLDER holds the models; the rest is benchmarks/peers/environments.py's.
set -eu
python=$1 folder=$2 here=$(dirname "$0")
shift 2
mkdir -p "$folder"
names="llama_cpp transformers gptqmodel vllm"
# shellcheck disable=SC2086 # several names
pythons=$("$python" "$here/../benchmarks/peers/environments.py" $names "$@")
"$python" "$here/readback.py" make "$folder"
status=0 line=0
for what in "readback.py llama" "readback.py transformers" "readback.py gptqmodel" readback_vllm.py; do
	line=$((line + 1))
	peer=$(echo "$pythons" | sed -n ${line}p)
	echo "$what:"
	# shellcheck disable=SC2086 # a script and its first word
	TQDM_DISABLE=1 "$peer" "$here"/$what "$folder" || status=1
done
exit $status
