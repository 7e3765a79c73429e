#!/bin/sh
# Build and run native/tests/check_*.cpp. `sanitize`: what this CPU runs, under AddressSanitizer and UBSan.
# `emulate`: the AVX-512 and VNNI variants on SIMDe, on any CPU; exits 2 where SIMDe is missing.
set -eu
cd "$(dirname "$0")/.."
OUT=$(mktemp -d)
trap 'rm -rf "$OUT"' EXIT
CXX=${CXX:-g++}
COMMON="-I. -std=c++17 -O1 -g -fopenmp -Wall -Wno-psabi -Wno-unknown-pragmas -Wno-maybe-uninitialized
 -Wno-uninitialized -ffp-contract=off"  # GCC 12 says so of its own AVX-512 headers
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
      [ -f "${family}_$variant.cpp" ] || continue  # avx512pairs: a linear variant of avx512vnni's file
      case $variant in
        avx2) flags="-mavx2 -mfma -mf16c" ;;
        avxvnni) flags="-mavx2 -mfma -mf16c -mavxvnni" ;;
        avx512) flags=$WIDE ;;
        avx512vnni) flags="$WIDE -mavx512vnni" ;;
        avx512amx | avx512pairs) flags="$WIDE -mavx512vnni -mavx512bf16" ;;
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
fused() { # variants... : the operators around both families, on the objects that they left
  for file in fused_portable segment gated attend_op experts sample tests/check_fused; do build $file; done
  for variant in "$@"; do
    case $MODE-$variant in
      sanitize-avx2) flags="-mavx2 -mfma" ;;
      sanitize-avx512) flags=$WIDE ;;
      *) flags= ;;
    esac
    # shellcheck disable=SC2086
    build fused_$variant $flags
  done
  rm -f "$OUT/check_linear.o" "$OUT/check_attention.o"
  # shellcheck disable=SC2086
  $CXX $LINK -fopenmp "$OUT"/*.o -o "$OUT/check_fused"
  "$OUT/check_fused"
}
ranges() { # variants... : GCC's own vectors, so that there is nothing to emulate
  build ranges_portable
  build tests/check_ranges
  for variant in "$@"; do
    case $variant in avx2) flags="-mavx2 -mfma" ;; *) flags=$WIDE ;; esac
    # shellcheck disable=SC2086
    build ranges_$variant $flags
  done
  $CXX $LINK -fopenmp "$OUT"/ranges_*.o "$OUT/check_ranges.o" -o "$OUT/check_ranges"
  "$OUT/check_ranges"
}
drafts() { # no variants
  for file in drafts automaton tests/check_drafts; do build $file; done
  # shellcheck disable=SC2086
  $CXX $LINK "$OUT"/drafts.o "$OUT"/automaton.o "$OUT"/check_drafts.o -o "$OUT/check_drafts"
  "$OUT/check_drafts"
}
MODE=${1:-}
case $MODE in
  sanitize)
    EXTRA=$SAFE
    LINK=$SAFE
    if [ "$(uname -m)" = x86_64 ]; then
      families avx2 avxvnni avx512 avx512vnni avx512pairs avx512amx
      fused avx2 avx512
      ranges avx2 avx512
      drafts
    else
      families
      fused
      ranges
      drafts
    fi
    ;;
  emulate)
    if ! echo '#include <simde/x86/avx512.h>' | $CXX -E -x c++ - >/dev/null 2>&1; then
      echo "SIMDe is missing (apt install libsimde-dev): the AVX-512 variants were NOT checked" >&2
      exit 2
    fi
    EXTRA="-DRIDGELINE_SIMDE -w"
    LINK=
    families avx512 avx512vnni avx512pairs avx512amx
    fused avx512
    build tests/check_probe
    $CXX "$OUT/check_probe.o" -o "$OUT/check_probe"
    "$OUT/check_probe"
    ;;
  *) echo "usage: check.sh sanitize|emulate" >&2; exit 64 ;;
esac
