// Which variant of the linear kernels runs: by asking the CPU. The names refine those of isa.h: "avxvnni"
// is avx2 with the byte product, "avx512" never uses VNNI, "avx512vnni" does, "avx512pairs" multiplies sums of pairs (int4) where that does,
// "avx512amx" also multiplies tiles.
#pragma once
#include <stdexcept>
#include <string>

#include "isa.h"
#include "linear.h"

namespace ridgeline {

struct LinearVariant {
  const char* name;
  const LinearOps& (*ops)();
  bool runs;
};

// Best first. A variant that the CPU lacks is listed as such and never called.
template <class Visit>
void each_linear_variant(Visit visit) {
#if defined(__x86_64__)
  const Isa best = best_isa();
  const bool wide = best == Isa::kAvx512, narrow = best != Isa::kPortable && __builtin_cpu_supports("f16c");
  const bool bytes = wide && __builtin_cpu_supports("avx512vnni");
  visit(LinearVariant{"avx512amx", linear_ops_avx512amx, bytes && has_tiles()});
  if (adds_bytes_beside()) visit(LinearVariant{"avx512pairs", linear_ops_avx512pairs, bytes});
  visit(LinearVariant{"avx512vnni", linear_ops_avx512vnni, bytes});
  if (!adds_bytes_beside()) visit(LinearVariant{"avx512pairs", linear_ops_avx512pairs, bytes});
  visit(LinearVariant{"avx512", linear_ops_avx512, wide});
  visit(LinearVariant{"avxvnni", linear_ops_avxvnni, narrow && __builtin_cpu_supports("avxvnni")});
  visit(LinearVariant{"avx2", linear_ops_avx2, narrow});
#endif
  visit(LinearVariant{"portable", linear_ops_portable, true});
}

inline std::string linear_isas() {
  std::string out;
  each_linear_variant([&](const LinearVariant& v) {
    if (v.runs) out += (out.empty() ? "" : ",") + std::string(v.name);
  });
  return out;
}

inline const LinearOps& linear_ops(const std::string& name) {
  const LinearOps* found = nullptr;
  bool known = name == "auto";
  each_linear_variant([&](const LinearVariant& v) {
    known = known || name == v.name;
    if (!found && v.runs && (name == "auto" || name == v.name)) found = &v.ops();
  });
  if (!known)
    throw std::invalid_argument(unknown_isa(name));
  if (!found) throw std::invalid_argument("this CPU lacks " + name + "; it runs: " + linear_isas());
  return *found;
}

}  // namespace ridgeline
