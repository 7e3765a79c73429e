#!/bin/sh
# Builds and runs the checks of native/tests.
#   sanitize  the variants that this CPU runs, under AddressSanitizer and UBSan
#   emulate   the AVX-512 and AMX variants on SIMDe, on any CPU; exits 2 where SIMDe is missing
#   headers   every header compiles on its own, for each instruction set that it is for
set -eu
cd "$(dirname "$0")/.."
OUT=$(mktemp -d)
trap 'rm -rf "$OUT"' EXIT
CXX=${CXX:-g++}
# GCC 12 warns of uninitialised variables in its own AVX-512 headers.
COMMON="-std=c++17 -g -fopenmp -ffp-contract=off -Wall -Wno-psabi -Wno-unknown-pragmas
 -Wno-maybe-uninitialized -Wno-uninitialized"
AVX2="-mavx2 -mfma -mf16c"
AVX512="-mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mf16c"
X86=$([ "$(uname -m)" = x86_64 ] && echo yes || echo no)

flags_of() { # variant -> compiler flags
  case $1 in
    avx2) echo "$AVX2" ;;
    avxvnni) echo "$AVX2 -mavxvnni" ;;
    avx512) echo "$AVX512" ;;
    avx512vnni) echo "$AVX512 -mavx512vnni" ;;
    avx512pairs | avx512amx) echo "$AVX512 -mavx512vnni -mavx512bf16" ;;
  esac
}
compile() { # object source flags...
  object=$1 source=$2; shift 2
  # shellcheck disable=SC2086
  $CXX $COMMON -O1 $OPTIONS "$@" -I. -c "$source" -o "$OUT/$object.o"
}
compile_variants() { # folder name variants... : name_portable, and those variants that have a file
  folder=$1 name=$2; shift 2
  compile "${name}_portable" "$folder/${name}_portable.cpp"
  for variant in "$@"; do
    [ -f "$folder/${name}_$variant.cpp" ] || continue
    # shellcheck disable=SC2046,SC2086
    if [ "$MODE" = emulate ]; then compile "${name}_$variant" "$folder/${name}_$variant.cpp" $EMULATE
    else compile "${name}_$variant" "$folder/${name}_$variant.cpp" $(flags_of "$variant"); fi
  done
}
run() { # check objects...
  check=$1; shift
  # shellcheck disable=SC2086
  compile "$check" "tests/$check.cpp" $CHECK_OPTIONS
  objects=; for object in "$@"; do objects="$objects $OUT/$object.o"; done
  # shellcheck disable=SC2086
  $CXX $OPTIONS -fopenmp "$OUT/$check.o" $objects -o "$OUT/$check"
  "$OUT/$check"
}
objects_of() { # name : the objects of its variants
  for file in "$OUT/$1"_*.o; do basename "$file" .o; done
}

check_kernels() { # variants... : linears, attention, and layers around both
  compile_variants linear linear "$@"
  compile linear linear/linear.cpp
  # shellcheck disable=SC2046
  run check_linear linear $(objects_of linear)
  compile_variants attention attention "$@"
  # shellcheck disable=SC2046
  run check_attention $(objects_of attention)
  # shellcheck disable=SC2046
  run check_int4_attention $(objects_of attention)
  compile_variants layer row_ops "$@"
  for file in segment rows operators gate attention_op experts; do
    compile "op_$file" layer/$file.cpp
  done
  compile draw sampling/draw.cpp
  # shellcheck disable=SC2046
  run check_layer linear $(objects_of linear) $(objects_of attention) $(objects_of row_ops) \
    op_segment op_rows op_operators op_gate op_attention_op op_experts draw
}
check_rest() { # variants...
  compile_variants quantize scale_search "$@"
  # shellcheck disable=SC2046
  run check_quantize $(objects_of scale_search)
  compile drafts speculation/drafts.cpp
  compile suffix_automaton speculation/suffix_automaton.cpp
  run check_speculation drafts suffix_automaton
}

check_header() { # header flags...
  header=$1; shift
  printf '#include "%s"\n' "$header" > "$OUT/header.cpp"
  # shellcheck disable=SC2086
  $CXX $COMMON -fsyntax-only -Wno-unused-function -I. $PYTHON_INCLUDES "$@" "$OUT/header.cpp" ||
    { echo "$header does not compile on its own with: $*" >&2; return 1; }
}
check_headers() {
  PYTHON_INCLUDES=
  failures=0 count=0
  for header in $(find . -name '*.h' -not -path './tests/*' | sed 's|^\./||' | sort); do
    count=$((count + 1))
    case $header in
      *avx512* | *amx* | *bf16* | *winograd*) sets=avx512pairs ;;
      *avx2* | *transpose* | *maddubs*) sets=avx2 ;;
      *portable*) sets=portable ;;
      simd/* | linear/* | attention/*) sets="portable avx2 avx512amx" ;;
      *) sets=portable ;;
    esac
    [ $X86 = yes ] || { case $sets in portable*) sets=portable ;; *) continue ;; esac; }
    # shellcheck disable=SC2046
    for set in $sets; do check_header "$header" $(flags_of $set) || failures=$((failures + 1)); done
  done
  echo "headers: $count, $failures do not compile on their own"
  [ $failures = 0 ]
}

MODE=${1:-}
CHECK_OPTIONS=
case $MODE in
  sanitize)
    OPTIONS="-fsanitize=address,undefined -fno-sanitize-recover=all"
    VARIANTS="avx2 avxvnni avx512 avx512vnni avx512pairs avx512amx"
    [ $X86 = yes ] || VARIANTS=
    # shellcheck disable=SC2086
    check_kernels $VARIANTS
    # shellcheck disable=SC2086
    check_rest $VARIANTS
    ;;
  emulate)
    if ! echo '#include <simde/x86/avx512.h>' | $CXX -E -x c++ - >/dev/null 2>&1; then
      echo "SIMDe is missing (apt install libsimde-dev): the AVX-512 variants were NOT checked" >&2
      exit 2
    fi
    OPTIONS=-w
    EMULATE=-Itests/emulation
    CHECK_OPTIONS=-DRIDGELINE_EMULATED
    check_kernels avx512 avx512vnni avx512pairs avx512amx
    CHECK_OPTIONS=$EMULATE
    run check_probe
    ;;
  headers) check_headers ;;
  *)
    echo "usage: check.sh sanitize|emulate|headers" >&2
    exit 64
    ;;
esac
