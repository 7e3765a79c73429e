// Which compiled kernel variants this CPU can run: asked of the CPU, never assumed.
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
  return "unknown ISA " + name +
         "; known: auto, portable, avx2, avxvnni, avx512, avx512vnni, avx512pairs, avx512amx";
}

// Whether the CPU has more ports for byte additions than for byte products, so that Winograd's
// inner product pays (linear/int4_winograd.h): AMD's cores from Zen 4 on.
inline bool has_fast_byte_adds() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

// Whether an instruction with two bfloat16 products per lane takes as long as one float product:
// AMD's cores from Zen 4 on. On Intel's it takes four times as long (docs/concepts/kernels.md), so
// that float32 is faster there.
inline bool has_fast_bf16_dot() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// Whether this process may use AMX tiles: the CPU has them, and Linux, which must save 8 KB more
// per thread that uses them, has granted the request.
inline bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
  static const bool granted = [] {
    __builtin_cpu_init();
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
           __builtin_cpu_supports("amx-bf16") &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return granted;
#else
  return false;
#endif
}

// The instruction set behind a variant's name. Throws std::invalid_argument if the name is unknown
// or this CPU lacks the instructions.
inline Isa isa_from(const std::string& name) {
  const Isa best = best_isa();
  if (name == "auto") return best;
  // Variants of the linear and attention kernels are one of these three for every other kernel.
  const bool is_avx512 = name == "avx512vnni" || name == "avx512pairs" || name == "avx512amx";
  const std::string family = name == "avxvnni" ? "avx2" : is_avx512 ? "avx512" : name;
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
