#!/bin/sh
# Every check and figure of a GPU in one go, in about nine minutes:
#
#     benchmarks/gpu/run.sh [FOLDER]        (default: $OUT, or build/gpu)
#
# Parts run in the order of their worth, each with a time limit; a part that fails does not stop the
# rest. Each writes its JSON and its log into FOLDER as it goes. PARTS names those to run.
cd "$(dirname "$0")/../.." || exit 1
OUT=${1:-${OUT:-build/gpu}}
PYTHON=${PYTHON:-python3}
PARTS=${PARTS:-"steps8b peer steps1b engine casestudy compiled tests doctor speculation products kernels optimize"}
mkdir -p "$OUT" || exit 1
OUT=$(cd "$OUT" && pwd)
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$OUT/inductor} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton}
BEGAN=$(date +%s)
SUMMARY=$OUT/summary.txt
: > "$SUMMARY"

# part NAME SECONDS COMMAND…: run a command with a time limit, its output in NAME.log.
part() {
    name=$1 limit=$2
    shift 2
    since=$(date +%s)
    timeout "$limit" "$@" > "$OUT/$name.log" 2>&1
    code=$?
    now=$(date +%s)
    echo "$name: exit $code after $((now - since)) s, at $((now - BEGAN)) s" | tee -a "$SUMMARY"
}

gpu_tests() {
    RIDGELINE_TEST_DEVICE=cuda "$PYTHON" -m pytest "$@" -q -n 8 -p no:cacheprovider \
        -o filterwarnings= -o addopts= --import-mode=importlib
}

run_part() {
    case $1 in
    steps8b) part steps8b 110 "$PYTHON" benchmarks/gpu/steps.py --json "$OUT/steps8b.json" ;;
    steps1b) part steps1b 60 "$PYTHON" benchmarks/gpu/steps.py --model dummy:llama-1b-32k \
        --json "$OUT/steps1b.json" ;;
    compiled) part compiled 60 "$PYTHON" benchmarks/gpu/steps.py --formats bf16 --sequences 1,32 \
        --modes graphs --layer-backend compiled --json "$OUT/compiled.json"
        part torch_layers 30 "$PYTHON" benchmarks/gpu/steps.py --formats bf16 --sequences 1,32 \
        --modes graphs --layer-backend torch --attention-backend tables --json "$OUT/torch_layers.json" ;;
    peer) part peer8b 60 "$PYTHON" benchmarks/gpu/peer_transformers.py --json "$OUT/peer8b.json"
        part peer1b 40 "$PYTHON" benchmarks/gpu/peer_transformers.py --model dummy:llama-1b-32k \
        --json "$OUT/peer1b.json" ;;
    tests) gpu_tests tests/gpu > "$OUT/tests.log" 2>&1
        tail -n 1 "$OUT/tests.log" | tee -a "$SUMMARY" ;;
    kernels) part kernels 80 env RIDGELINE_TEST_DEVICE=cuda "$PYTHON" -m pytest \
        tests/engine/kernels/triton -q -n 8 -p no:cacheprovider -o filterwarnings= -o addopts= \
        --import-mode=importlib
        tail -n 1 "$OUT/kernels.log" | tee -a "$SUMMARY" ;;
    products) part products 40 "$PYTHON" benchmarks/gpu/products.py --rows 1,32,128,2048 \
        --json "$OUT/products.json" ;;
    engine) part engine 90 "$PYTHON" benchmarks/gpu/engine.py --json "$OUT/engine.json" ;;
    casestudy) part casestudy 75 "$PYTHON" -m ridgeline lab casestudy dummy:llama-1b-32k \
        --device cuda --max-concurrency 8 --input-len 512 --output-len 64 --rounds 3 \
        --output-json "$OUT/casestudy.json" --html "$OUT/casestudy.html" ;;
    speculation) part speculation 60 "$PYTHON" benchmarks/gpu/engine.py --speculation \
        --json "$OUT/speculation.json" ;;
    doctor)
        part doctor 30 "$PYTHON" -m ridgeline doctor
        part bench 40 "$PYTHON" -m ridgeline bench demo --device cuda --output-json "$OUT/bench.json"
        part explain 20 "$PYTHON" -m ridgeline explain demo --device cuda
        part profile 40 "$PYTHON" -m ridgeline diagnose dummy:llama-1b-32k --profile --device cuda \
            --max-model-len 4096 --max-num-batched-tokens 2048 --input-len 256 --output-len 64
        ;;
    optimize) part optimize 250 "$PYTHON" -m ridgeline optimize demo --device cuda --budget 3m \
        -o "$OUT/optimize" ;;
    *) echo "unknown part $1" | tee -a "$SUMMARY" ;;
    esac
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$OUT/gpu.txt"
for each in $PARTS; do
    run_part "$each"
done
"$PYTHON" benchmarks/gpu/table.py "$OUT" | tee -a "$SUMMARY"
