#!/bin/sh
# scripts/readback.py, in llama.cpp's, transformers' and GPTQModel's environments (made once:
# minutes).
#   check_readback.sh PYTHON FOLDER [--home DIR] [--use llama_cpp=DIR] [--use transformers=DIR]
# PYTHON has ridgeline; FOLDER holds the models; the rest is benchmarks/peers/environments.py's.
set -eu
python=$1 folder=$2 here=$(dirname "$0")
shift 2
mkdir -p "$folder"
pythons=$("$python" "$here/../benchmarks/peers/environments.py" llama_cpp transformers gptqmodel "$@")
llama=$(echo "$pythons" | sed -n 1p) transformers=$(echo "$pythons" | sed -n 2p)
gptqmodel=$(echo "$pythons" | sed -n 3p)
"$python" "$here/readback.py" make "$folder"
status=0
"$llama" "$here/readback.py" llama "$folder" || status=1
TQDM_DISABLE=1 "$transformers" "$here/readback.py" transformers "$folder" || status=1
"$gptqmodel" "$here/readback.py" gptqmodel "$folder" || status=1
exit $status
