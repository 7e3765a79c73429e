#!/bin/sh
# Every check and figure of a GPU in one go, in nine minutes:
#
#     benchmarks/gpu/run.sh [FOLDER]        (default: $OUT, or build/gpu)
#
# Parts run in the order of their worth, each with a time limit, about a fifth above what it took on
# an H200; together the limits are the nine minutes (SECONDS_LEFT, 540), so that the search, which
# comes last and has all the time that is left, is reached whatever the others do. A part that fails
# does not stop the rest; one that does not end at its limit is interrupted, so that it can write
# what it has, killed 5 s later, and summary.txt says so. Each writes its log into FOLDER as it goes,
# and its JSON as it goes or (doctor, explain, profile) at its end, without which there is none.
# PARTS names those to run; parts that are left out unless they are named were
# measured before, or take too long: steps1b, peer1b, compiled, products and kernels.
#
# Without a GPU: DRY_RUN=1 prints the commands of all parts (a test parses them), and DEVICE=cpu runs
# the parts that can begin on a CPU with tiny sizes and ten times the limits, which shows that they
# work; its figures mean nothing.
cd "$(dirname "$0")/../.." || exit 1
OUT=${1:-${OUT:-build/gpu}}
PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-cuda}
BIG=dummy:llama-3.1-8b SMALL=dummy:llama-1b-32k EXPERTS=dummy:qwen1.5-moe-a2.7b
GRAPHS="--modes graphs" STEPS="" DECODE="--formats bf16 --sequences 1,32" SMALL_STEPS="--formats bf16,fp8"
REQUESTS="" DRAFTS="--requests 1,32 --input 256" TABLES="--attention-backend tables"
STUDY="--max-concurrency 8 --input-len 512 --output-len 64 --rounds 2"
MIXED="--formats bf16 --sequences 32 --chunks 32,128,448" NVFP4="--formats nvfp4 --sequences 1,32"
PROFILE="--max-model-len 4096 --max-num-batched-tokens 2048 --input-len 256 --output-len 64"
CALIBRATE="--budget 8" SEARCH_S=136
CPU_PARTS="steps8b engine pieces speculation casestudy doctor nvfp4 steps1b calibrate compiled optimize"
if [ "$DEVICE" = cpu ]; then
    TINY="--context 16 --prompt 32 --steps 2"
    BIG=demo SMALL=demo EXPERTS=demo STEPS="--formats bf16,int8 --sequences 1,2 $TINY"
    DECODE="--formats bf16 --sequences 1 $TINY" SMALL_STEPS="--formats bf16 --sequences 1 $TINY"
    MIXED="--formats bf16 --sequences 2 --chunks 8 $TINY" NVFP4="--formats nvfp4 --sequences 1 $TINY"
    REQUESTS="--formats bf16 --requests 1,2 --input 16 --output 8"
    DRAFTS="--requests 1,2 --input 64 --output 16"
    STUDY="--max-concurrency 2 --input-len 16 --output-len 8 --rounds 1 --stages eager,int8"
    PROFILE="--max-model-len 512 --input-len 32 --output-len 8"
    CALIBRATE="--budget 60" SEARCH_S=200
    TABLES=""  # refused on a CPU: only CUDA graphs make up for it
    PARTS=${PARTS:-$CPU_PARTS}
fi
mkdir -p "$OUT" || exit 1
OUT=$(cd "$OUT" && pwd)
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$OUT/inductor} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton}
PARTS=${PARTS:-"steps8b peer tests engine pieces speculation casestudy doctor nvfp4 ahead calibrate optimize"}
BEGAN=$(date +%s)
SUMMARY=$OUT/summary.txt
: > "$SUMMARY"

# seconds_left: of the nine minutes.
seconds_left() {
    echo $((BEGAN + ${SECONDS_LEFT:-540} - $(date +%s)))
}

# part NAME SECONDS COMMAND…: run a command with a time limit, its output in NAME.log.
part() {
    name=$1 limit=$2
    shift 2
    if [ -n "$DRY_RUN" ]; then
        echo "$name $limit $*"
        return
    fi
    since=$(date +%s) left=$(seconds_left)
    if [ "$DEVICE" = cpu ]; then
        limit=$((10 * limit))
    elif [ "$left" -lt 10 ]; then
        echo "$name: left out, the time is over" | tee -a "$SUMMARY"
        return
    elif [ "$left" -lt "$limit" ]; then
        limit=$left
    fi
    if [ -n "$PRINTS_JSON" ]; then
        timeout -s INT -k 5 "$limit" "$@" > "$OUT/$name.json" 2> "$OUT/$name.log"
    else
        timeout -s INT -k 5 "$limit" "$@" > "$OUT/$name.log" 2>&1
    fi
    code=$?
    now=$(date +%s) why=""
    case $code in 124 | 137) why=", stopped at its limit of $limit s" ;; esac
    if [ $code = 137 ] && [ $((now - since)) -lt "$limit" ]; then
        why=", killed before its limit of $limit s: perhaps memory ran out"
    fi
    [ -s "$OUT/$name.json" ] || rm -f "$OUT/$name.json"
    echo "$name: exit $code after $((now - since)) s, at $((now - BEGAN)) s$why" | tee -a "$SUMMARY"
}

# json_part NAME SECONDS COMMAND…: the same for a command that prints JSON.
json_part() {
    PRINTS_JSON=1
    part "$@"
    PRINTS_JSON=""
}

# search: with the time that the parts before have left, of which 30 s are for its start and its end.
search() {
    limit=$SEARCH_S left=$(seconds_left)
    [ "$DEVICE" = cpu ] || [ -n "$DRY_RUN" ] || [ "$left" -lt "$limit" ] || limit=$left
    part optimize "$limit" "$PYTHON" -m ridgeline optimize demo --device "$DEVICE" \
        --budget "$((limit - 30))s" -o "$OUT/optimize"
}

# gpu_tests NAME SECONDS PATH: run tests on the device; the last line of their output is a summary.
gpu_tests() {
    part "$1" "$2" env RIDGELINE_TEST_DEVICE=$DEVICE "$PYTHON" -m pytest "$3" -q -n 8 \
        -p no:cacheprovider -o filterwarnings= -o addopts= --import-mode=importlib
    [ -n "$DRY_RUN" ] || tail -n 1 "$OUT/$1.log" | tee -a "$SUMMARY"
}

# steps NAME SECONDS MODEL ARGUMENTS…: time steps of a model.
steps() {
    name=$1 limit=$2 model=$3
    shift 3
    part "$name" "$limit" "$PYTHON" benchmarks/gpu/steps.py --device "$DEVICE" --model "$model" \
        $GRAPHS "$@" --json "$OUT/$name.json"
}

# requests NAME SECONDS ARGUMENTS…: time whole requests.
requests() {
    name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$PYTHON" benchmarks/gpu/engine.py --device "$DEVICE" --model "$BIG" \
        "$@" --json "$OUT/$name.json"
}

# Variables without quotes hold several words each.
run_part() {
    case $1 in
    steps8b) steps steps8b 55 $BIG $STEPS ;;
    peer) part peer8b 26 "$PYTHON" benchmarks/gpu/peer_transformers.py --json "$OUT/peer8b.json" ;;
    tests) gpu_tests tests 50 tests/gpu ;;
    engine) requests engine 38 $REQUESTS ;;
    pieces)
        steps pieces 28 $BIG $MIXED
        steps experts 21 $EXPERTS $MIXED
        ;;
    speculation) requests speculation 35 $DRAFTS --speculation ;;
    casestudy) part casestudy 40 "$PYTHON" -m ridgeline lab casestudy $SMALL --device "$DEVICE" \
        $STUDY --output-json "$OUT/casestudy.json" --html "$OUT/casestudy.html" ;;
    doctor)
        json_part doctor 12 "$PYTHON" -m ridgeline doctor --json
        part bench 17 "$PYTHON" -m ridgeline bench demo --device "$DEVICE" \
            --output-json "$OUT/bench.json"
        json_part explain 7 "$PYTHON" -m ridgeline explain demo --device "$DEVICE" --json
        json_part profile 16 "$PYTHON" -m ridgeline diagnose $SMALL --profile --device "$DEVICE" \
            $PROFILE --json
        ;;
    nvfp4) steps nvfp4 18 $BIG $NVFP4 ;;
    steps1b) steps steps1b 18 $SMALL $SMALL_STEPS ;;
    ahead) requests ahead 17 --formats bf16 --requests 32 --async-scheduling ;;
    calibrate) part calibrate 24 "$PYTHON" -m ridgeline calibrate --engine $SMALL \
        --device "$DEVICE" --quantization dense $CALIBRATE --output "$OUT/calibration.json" ;;
    peer1b) part peer1b 25 "$PYTHON" benchmarks/gpu/peer_transformers.py --model $SMALL \
        --json "$OUT/peer1b.json" ;;
    compiled)
        steps compiled 30 $BIG $DECODE --layer-backend compiled
        steps torch_layers 15 $BIG $DECODE --layer-backend torch $TABLES
        ;;
    products) part products 15 "$PYTHON" benchmarks/gpu/products.py --rows 1,32,128,2048 \
        --json "$OUT/products.json" ;;
    kernels) gpu_tests kernels 80 tests/engine/kernels/triton ;;
    optimize) search ;;
    *) echo "unknown part $1" | tee -a "$SUMMARY" ;;
    esac
}

[ "$DEVICE" = cpu ] || [ -n "$DRY_RUN" ] ||
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$OUT/gpu.txt"
for each in $PARTS; do
    run_part "$each"
done
[ -n "$DRY_RUN" ] || "$PYTHON" benchmarks/gpu/table.py "$OUT" | tee -a "$SUMMARY"
