#!/bin/sh
# Build and run native/tests/check_*.cpp. `sanitize`: what this CPU runs, under AddressSanitizer and UBSan.
# `emulate`: the AVX-512 and VNNI variants on SIMDe, on any CPU; exits 2 where SIMDe is missing.
set -eu
cd "$(dirname "$0")/.."
OUT=$(mktemp -d)
trap 'rm -rf "$OUT"' EXIT
CXX=${CXX:-g++}
COMMON="-I. -std=c++17 -O1 -g -fopenmp -Wall -Wno-psabi -Wno-unknown-pragmas -ffp-contract=off"
SAFE="-fsanitize=address,undefined -fno-sanitize-recover=all"
WIDE="-mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mf16c"
build() { # name flags...
  name=$1; shift
  # shellcheck disable=SC2086
  $CXX $COMMON $EXTRA "$@" -c "$name.cpp" -o "$OUT/$(basename "$name").o"
}
families() { # variants... : each family's files, then its check
  for family in linear attention; do
    build ${family}_portable
    build tests/check_$family
    for variant in "$@"; do
      case $variant in
        avx2) flags="-mavx2 -mfma -mf16c" ;;
        avxvnni) flags="-mavx2 -mfma -mf16c -mavxvnni" ;;
        avx512) flags=$WIDE ;;
        avx512vnni) flags="$WIDE -mavx512vnni" ;;
      esac
      # shellcheck disable=SC2086
      if [ "$MODE" = emulate ]; then build ${family}_$variant; else build ${family}_$variant $flags; fi
    done
    extra=; [ $family = linear ] && { build linear; extra="$OUT/linear.o"; }
    # shellcheck disable=SC2086
    $CXX $LINK -fopenmp "$OUT"/${family}_*.o "$OUT/check_$family.o" $extra -o "$OUT/check_$family"
    "$OUT/check_$family"
  done
}
MODE=${1:-}
case $MODE in
  sanitize)
    EXTRA=$SAFE
    LINK=$SAFE
    if [ "$(uname -m)" = x86_64 ]; then families avx2 avxvnni avx512 avx512vnni; else families; fi
    ;;
  emulate)
    if ! echo '#include <simde/x86/avx512.h>' | $CXX -E -x c++ - >/dev/null 2>&1; then
      echo "SIMDe is missing (apt install libsimde-dev): the AVX-512 variants were NOT checked" >&2
      exit 2
    fi
    EXTRA="-DRIDGELINE_SIMDE -w"
    LINK=
    families avx512 avx512vnni
    ;;
  *) echo "usage: check.sh sanitize|emulate" >&2; exit 64 ;;
esac
