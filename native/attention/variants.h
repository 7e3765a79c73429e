// Which variant of the attention kernels runs on this CPU. The names are those of
// linear/variants.h: "avx512pairs" multiplies bfloat16 by vdpbf16ps where the CPU has it,
// "avx512amx" by AMX tiles (and int8 where there are many rows); the rest of both is as in
// avx512vnni.
#pragma once
#include <stdexcept>
#include <string>

#include "attention/attention.h"
#include "simd/dispatch.h"

namespace ridgeline {

struct AttentionVariant {
  const char* name;
  const AttentionOps& (*ops)();
  bool runs_here;
};

// Best first. A variant that the CPU lacks is listed, but must not be called.
template <class Visit>
void each_attention_variant(Visit visit) {
#if defined(__x86_64__)
  const Isa best = best_isa();
  const bool avx512 = best == Isa::kAvx512;
  const bool avx2 = best != Isa::kPortable && __builtin_cpu_supports("f16c");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  const bool avxvnni = avx2 && __builtin_cpu_supports("avxvnni");
  visit(AttentionVariant{"avx512amx", attention_ops_avx512amx, bf16 && has_amx()});
  const AttentionVariant bf16_dot = {
      "avx512pairs", bf16 ? attention_ops_avx512pairs : attention_ops_avx512vnni, vnni};
  if (has_fast_bf16_dot()) visit(bf16_dot);
  visit(AttentionVariant{"avx512vnni", attention_ops_avx512vnni, vnni});
  if (!has_fast_bf16_dot()) visit(bf16_dot);
  visit(AttentionVariant{"avx512", attention_ops_avx512, avx512});
  visit(AttentionVariant{"avxvnni", attention_ops_avxvnni, avxvnni});
  visit(AttentionVariant{"avx2", attention_ops_avx2, avx2});
#endif
  visit(AttentionVariant{"portable", attention_ops_portable, true});
}

// The variant by name, "auto" for the best. Throws std::invalid_argument if the name is unknown or
// this CPU lacks the instructions.
inline const AttentionOps& attention_ops(const std::string& name) {
  const AttentionOps* ops = nullptr;
  bool is_known = name == "auto";
  each_attention_variant([&](const AttentionVariant& v) {
    is_known = is_known || name == v.name;
    if (!ops && v.runs_here && (name == "auto" || name == v.name)) ops = &v.ops();
  });
  if (!is_known) throw std::invalid_argument(unknown_isa(name));
  if (!ops) throw std::invalid_argument("this CPU lacks " + name);
  return *ops;
}

}  // namespace ridgeline
