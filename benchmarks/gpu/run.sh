#!/bin/sh
# Every check and figure of a GPU in one go, in about nine minutes:
#
#     benchmarks/gpu/run.sh [FOLDER]        (default: $OUT, or build/gpu)
#
# Parts run in the order of their worth, each with a time limit; a part that fails does not stop the
# rest, and none begins or goes on when SECONDS_LEFT (540) are over; one that does not end at its
# limit is killed 5 s later. Each writes its JSON and its log into FOLDER as it goes. PARTS names
# those to run.
#
# Without a GPU: DRY_RUN=1 prints the commands of all parts (a test parses them), and DEVICE=cpu runs
# the parts that can begin on a CPU with tiny sizes and without the limit, which shows that they
# work; its figures mean nothing.
cd "$(dirname "$0")/../.." || exit 1
OUT=${1:-${OUT:-build/gpu}}
PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-cuda}
BIG=dummy:llama-3.1-8b SMALL=dummy:llama-1b-32k EXPERTS=dummy:qwen1.5-moe-a2.7b STEPS="" DECODE="--formats bf16 --sequences 1,32 --modes graphs"
REQUESTS="" TABLES="--attention-backend tables" STUDY="--max-concurrency 8 --input-len 512 --output-len 64 --rounds 3"
MIXED="--formats bf16 --sequences 32 --modes graphs --chunks 32,128,448" NVFP4="--formats nvfp4 --sequences 1,32 --modes graphs"
PROFILE="--max-model-len 4096 --max-num-batched-tokens 2048 --input-len 256 --output-len 64"
CPU_PARTS="steps8b pieces nvfp4 steps1b engine casestudy compiled doctor speculation calibrate optimize"
if [ "$DEVICE" = cpu ]; then
    BIG=demo SMALL=demo EXPERTS=demo STEPS="--formats bf16,int8 --sequences 1,2 --context 16 --prompt 32 --steps 2"
    DECODE="--formats bf16 --sequences 1 --context 16 --prompt 32 --steps 2 --modes graphs"
    MIXED="--formats bf16 --sequences 2 --context 16 --prompt 32 --steps 2 --modes graphs --chunks 8"
    NVFP4="--formats nvfp4 --sequences 1 --context 16 --prompt 32 --steps 2 --modes graphs"
    REQUESTS="--formats bf16 --requests 1,2 --input 16 --output 8"
    STUDY="--max-concurrency 2 --input-len 16 --output-len 8 --rounds 1 --stages eager,int8"
    PROFILE="--max-model-len 512 --input-len 32 --output-len 8"
    TABLES=""  # refused on a CPU: only CUDA graphs make up for it
    PARTS=${PARTS:-$CPU_PARTS}
fi
mkdir -p "$OUT" || exit 1
OUT=$(cd "$OUT" && pwd)
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$OUT/inductor} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton}
PARTS=${PARTS:-"steps8b peer pieces tests nvfp4 steps1b engine casestudy ahead compiled doctor speculation products calibrate kernels optimize"}
BEGAN=$(date +%s)
SUMMARY=$OUT/summary.txt
: > "$SUMMARY"

# part NAME SECONDS COMMAND…: run a command with a time limit, its output in NAME.log.
part() {
    name=$1 limit=$2
    shift 2
    if [ -n "$DRY_RUN" ]; then
        echo "$name $limit $*"
        return
    fi
    since=$(date +%s)
    left=$((BEGAN + ${SECONDS_LEFT:-540} - since))
    if [ "$DEVICE" = cpu ]; then
        limit=$((10 * limit))
    elif [ "$left" -lt 10 ]; then
        echo "$name: left out, the time is over" | tee -a "$SUMMARY"
        return
    elif [ "$left" -lt "$limit" ]; then
        limit=$left
    fi
    timeout -k 5 "$limit" "$@" > "$OUT/$name.log" 2>&1
    code=$?
    now=$(date +%s)
    echo "$name: exit $code after $((now - since)) s, at $((now - BEGAN)) s" | tee -a "$SUMMARY"
}

# gpu_tests NAME SECONDS PATH: run tests on the device; the last line of their output is a summary.
gpu_tests() {
    part "$1" "$2" env RIDGELINE_TEST_DEVICE=$DEVICE "$PYTHON" -m pytest "$3" -q -n 8 \
        -p no:cacheprovider -o filterwarnings= -o addopts= --import-mode=importlib
    [ -n "$DRY_RUN" ] || tail -n 1 "$OUT/$1.log" | tee -a "$SUMMARY"
}

# STEPS, DECODE, REQUESTS and STUDY hold several words each.
run_part() {
    case $1 in
    steps8b) part steps8b 110 "$PYTHON" benchmarks/gpu/steps.py --device "$DEVICE" --model $BIG \
        $STEPS --json "$OUT/steps8b.json" ;;
    steps1b) part steps1b 60 "$PYTHON" benchmarks/gpu/steps.py --device "$DEVICE" --model $SMALL \
        $STEPS --json "$OUT/steps1b.json" ;;
    pieces) part pieces 60 "$PYTHON" benchmarks/gpu/steps.py --device "$DEVICE" --model $BIG \
        $MIXED --json "$OUT/pieces.json"
        part experts 40 "$PYTHON" benchmarks/gpu/steps.py --device "$DEVICE" --model $EXPERTS \
        $MIXED --json "$OUT/experts.json" ;;
    nvfp4) part nvfp4 50 "$PYTHON" benchmarks/gpu/steps.py --device "$DEVICE" --model $BIG \
        $NVFP4 --json "$OUT/nvfp4.json" ;;
    compiled) part compiled 60 "$PYTHON" benchmarks/gpu/steps.py --device "$DEVICE" --model $BIG \
        $DECODE --layer-backend compiled --json "$OUT/compiled.json"
        part torch_layers 30 "$PYTHON" benchmarks/gpu/steps.py --device "$DEVICE" --model $BIG \
        $DECODE --layer-backend torch $TABLES --json "$OUT/torch_layers.json" ;;
    peer) part peer8b 60 "$PYTHON" benchmarks/gpu/peer_transformers.py --json "$OUT/peer8b.json"
        part peer1b 40 "$PYTHON" benchmarks/gpu/peer_transformers.py --model $SMALL \
        --json "$OUT/peer1b.json" ;;
    tests) gpu_tests tests 120 tests/gpu ;;
    kernels) gpu_tests kernels 80 tests/engine/kernels/triton ;;
    products) part products 40 "$PYTHON" benchmarks/gpu/products.py --rows 1,32,128,2048 \
        --json "$OUT/products.json" ;;
    engine) part engine 90 "$PYTHON" benchmarks/gpu/engine.py --device "$DEVICE" --model $BIG \
        $REQUESTS --json "$OUT/engine.json" ;;
    casestudy) part casestudy 75 "$PYTHON" -m ridgeline lab casestudy $SMALL --device "$DEVICE" \
        $STUDY --output-json "$OUT/casestudy.json" --html "$OUT/casestudy.html" ;;
    ahead) part ahead 60 "$PYTHON" benchmarks/gpu/engine.py --device "$DEVICE" --model $BIG \
        $REQUESTS --formats bf16 --async-scheduling --json "$OUT/ahead.json" ;;
    speculation) part speculation 60 "$PYTHON" benchmarks/gpu/engine.py --device "$DEVICE" \
        --model $BIG $REQUESTS --speculation --json "$OUT/speculation.json" ;;
    doctor)
        part doctor 30 "$PYTHON" -m ridgeline doctor
        part bench 40 "$PYTHON" -m ridgeline bench demo --device "$DEVICE" \
            --output-json "$OUT/bench.json"
        part explain 20 "$PYTHON" -m ridgeline explain demo --device "$DEVICE"
        part profile 40 "$PYTHON" -m ridgeline diagnose $SMALL --profile --device "$DEVICE" \
            $PROFILE
        ;;
    calibrate) part calibrate 60 "$PYTHON" -m ridgeline calibrate --engine $SMALL \
        --quantization bf16 --budget 40 --output "$OUT/calibration.json" ;;
    optimize) part optimize 250 "$PYTHON" -m ridgeline optimize demo --device "$DEVICE" \
        --budget 3m -o "$OUT/optimize" ;;
    *) echo "unknown part $1" | tee -a "$SUMMARY" ;;
    esac
}

[ "$DEVICE" = cpu ] || [ -n "$DRY_RUN" ] ||
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$OUT/gpu.txt"
for each in $PARTS; do
    run_part "$each"
done
[ -n "$DRY_RUN" ] || "$PYTHON" benchmarks/gpu/table.py "$OUT" | tee -a "$SUMMARY"
