#!/bin/sh
# Build and run native/tests/check_linear.cpp. `sanitize`: what this CPU runs, under AddressSanitizer and
# UBSan. `emulate`: the AVX-512 and VNNI variants on SIMDe, on any CPU; exits 2 where SIMDe is missing.
set -eu
cd "$(dirname "$0")/.."
OUT=$(mktemp -d)
trap 'rm -rf "$OUT"' EXIT
CXX=${CXX:-g++}
COMMON="-I. -std=c++17 -O1 -g -fopenmp -Wall -Wno-psabi -Wno-unknown-pragmas -ffp-contract=off"
SAFE="-fsanitize=address,undefined -fno-sanitize-recover=all"
build() { # name flags...
  name=$1; shift
  # shellcheck disable=SC2086
  $CXX $COMMON $EXTRA "$@" -c "$name.cpp" -o "$OUT/$(basename "$name").o"
}
case "${1:-}" in
  sanitize)
    EXTRA=$SAFE
    for name in linear linear_portable tests/check_linear; do build $name; done
    if [ "$(uname -m)" = x86_64 ]; then
      WIDE="-mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mf16c"
      build linear_avx2 -mavx2 -mfma -mf16c
      build linear_avxvnni -mavx2 -mfma -mf16c -mavxvnni
      # shellcheck disable=SC2086
      build linear_avx512 $WIDE
      # shellcheck disable=SC2086
      build linear_avx512vnni $WIDE -mavx512vnni
    fi
    $CXX $SAFE -fopenmp "$OUT"/*.o -o "$OUT/check"
    ;;
  emulate)
    if ! echo '#include <simde/x86/avx512.h>' | $CXX -E -x c++ - >/dev/null 2>&1; then
      echo "SIMDe is missing (apt install libsimde-dev): the AVX-512 variants were NOT checked" >&2
      exit 2
    fi
    EXTRA="-DRIDGELINE_SIMDE -w"
    for name in linear linear_portable linear_avx512 linear_avx512vnni tests/check_linear; do build $name; done
    $CXX -fopenmp "$OUT"/*.o -o "$OUT/check"
    ;;
  *) echo "usage: check.sh sanitize|emulate" >&2; exit 64 ;;
esac
"$OUT/check"
