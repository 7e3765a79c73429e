// Which variant of the linear kernels runs on this CPU. The names refine those of simd/dispatch.h:
// "avxvnni" is avx2 with byte dot products; "avx512" never uses VNNI, "avx512vnni" does;
// "avx512pairs" also uses Winograd's inner product for int4; "avx512amx" also uses AMX tiles.
#pragma once
#include <stdexcept>
#include <string>

#include "linear/linear.h"
#include "simd/dispatch.h"

namespace ridgeline {

struct LinearVariant {
  const char* name;
  const LinearOps& (*ops)();
  bool runs_here;
};

// Best first. A variant that the CPU lacks is listed, but must not be called.
template <class Visit>
void each_linear_variant(Visit visit) {
#if defined(__x86_64__)
  const Isa best = best_isa();
  const bool avx512 = best == Isa::kAvx512;
  const bool avx2 = best != Isa::kPortable && __builtin_cpu_supports("f16c");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool avxvnni = avx2 && __builtin_cpu_supports("avxvnni");
  visit(LinearVariant{"avx512amx", linear_ops_avx512amx, vnni && has_amx()});
  if (has_fast_byte_adds()) visit(LinearVariant{"avx512pairs", linear_ops_avx512pairs, vnni});
  visit(LinearVariant{"avx512vnni", linear_ops_avx512vnni, vnni});
  if (!has_fast_byte_adds()) visit(LinearVariant{"avx512pairs", linear_ops_avx512pairs, vnni});
  visit(LinearVariant{"avx512", linear_ops_avx512, avx512});
  visit(LinearVariant{"avxvnni", linear_ops_avxvnni, avxvnni});
  visit(LinearVariant{"avx2", linear_ops_avx2, avx2});
#endif
  visit(LinearVariant{"portable", linear_ops_portable, true});
}

// The names of the variants that run here, best first, comma-separated.
inline std::string linear_isas() {
  std::string out;
  each_linear_variant([&](const LinearVariant& v) {
    if (v.runs_here) out += (out.empty() ? "" : ",") + std::string(v.name);
  });
  return out;
}

// The variant by name, "auto" for the best. Throws std::invalid_argument if the name is unknown or
// this CPU lacks the instructions.
inline const LinearOps& linear_ops(const std::string& name) {
  const LinearOps* ops = nullptr;
  bool is_known = name == "auto";
  each_linear_variant([&](const LinearVariant& v) {
    is_known = is_known || name == v.name;
    if (!ops && v.runs_here && (name == "auto" || name == v.name)) ops = &v.ops();
  });
  if (!is_known) throw std::invalid_argument(unknown_isa(name));
  if (!ops) throw std::invalid_argument("this CPU lacks " + name + "; it runs: " + linear_isas());
  return *ops;
}

}  // namespace ridgeline
