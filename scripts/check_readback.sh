#!/bin/sh
# scripts/readback.py in environments of its own, made here once.
#   check_readback.sh PYTHON FOLDER        PYTHON has ridgeline; FOLDER holds environments and models
set -eu
python=$1 folder=$2 here=$(dirname "$0")
mkdir -p "$folder/models"
if [ ! -x "$folder/llama/bin/python" ]; then
    "$python" -m venv "$folder/llama"
    "$folder/llama/bin/python" -m pip install --quiet llama-cpp-python
fi
if [ ! -x "$folder/transformers/bin/python" ]; then
    "$python" -m venv "$folder/transformers"
    "$folder/transformers/bin/python" -m pip install --quiet torch==2.13.0
    "$folder/transformers/bin/python" -m pip install --quiet transformers accelerate compressed-tensors bitsandbytes
fi
"$python" "$here/readback.py" make "$folder/models"
status=0
"$folder/llama/bin/python" "$here/readback.py" llama "$folder/models" || status=1
"$folder/transformers/bin/python" "$here/readback.py" transformers "$folder/models" || status=1
exit $status
