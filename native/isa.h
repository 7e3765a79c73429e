// Which compiled kernel variant a process uses: decided by asking the CPU, never by assuming.
#pragma once
#include <stdexcept>
#include <string>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ridgeline {

enum class Isa { kPortable, kAvx2, kAvx512 };

inline Isa best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    return Isa::kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::kAvx2;
#endif
  return Isa::kPortable;
}

inline const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx2: return "avx2";
    default: return "portable";
  }
}

inline std::string unknown_isa(const std::string& name) {
  return "unknown ISA " + name + "; known: auto, portable, avx2, avxvnni, avx512, avx512vnni, avx512pairs, avx512amx";
}

// Whether bytes are added in more places than they are multiplied (linear_pairs.inc): AMD's cores from Zen 4 on.
inline bool adds_bytes_beside() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

// Whether two products of bfloat16 a lane take as long as one of floats: AMD's cores from Zen 4 on. Intel's take four times as
// long (docs/concepts/kernels.md), so that float32 is faster there.
inline bool multiplies_pairs_fast() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// Whether this process may multiply tiles (AMX): the CPU can, and the system, which has to keep 8 KB more of every
// thread that does, was asked and agrees (a system without the question, or one that refuses, says no).
inline bool has_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  static const bool granted = [] {
    __builtin_cpu_init();
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-bf16") &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return granted;
#else
  return false;
#endif
}

// The variant by name; one that this CPU cannot run is refused, never executed.
inline Isa isa_from(const std::string& name) {
  const Isa best = best_isa();
  if (name == "auto") return best;
  // The variants with byte products (linear_isa.h) are of these families for every other kernel.
  const bool wide = name == "avx512vnni" || name == "avx512pairs" || name == "avx512amx";
  const std::string family = name == "avxvnni" ? "avx2" : wide ? "avx512" : name;
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (family != isa_name(isa)) continue;
    if (static_cast<int>(isa) > static_cast<int>(best))
      throw std::invalid_argument("this CPU lacks " + name + "; best here: " + isa_name(best));
    return isa;
  }
  throw std::invalid_argument(unknown_isa(name));
}

inline void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

}  // namespace ridgeline
