// Which compiled kernel variant a process uses: decided by asking the CPU, never by assuming.
#pragma once
#include <stdexcept>
#include <string>

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

// The variant by name; one that this CPU cannot run is refused, never executed.
inline Isa isa_from(const std::string& name) {
  const Isa best = best_isa();
  if (name == "auto") return best;
  // The variants with byte products (linear_isa.h) are of these families for every other kernel.
  const std::string family = name == "avxvnni" ? "avx2" : name == "avx512vnni" ? "avx512" : name;
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (family != isa_name(isa)) continue;
    if (static_cast<int>(isa) > static_cast<int>(best))
      throw std::invalid_argument("this CPU lacks " + name + "; best here: " + isa_name(best));
    return isa;
  }
  throw std::invalid_argument("unknown ISA " + name + "; known: auto, portable, avx2, avxvnni, avx512, avx512vnni");
}

inline void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

}  // namespace ridgeline
