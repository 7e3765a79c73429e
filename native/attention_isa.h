// Which variant of the attention kernels runs: by asking the CPU. The names are those of linear_isa.h; "avx512pairs"
// multiplies bfloat16 by pairs where the CPU can, "avx512amx" by tiles, and many rows of int8; the rest as avx512vnni does.
#pragma once
#include <stdexcept>
#include <string>

#include "attention.h"
#include "isa.h"

namespace ridgeline {

struct AttentionVariant {
  const char* name;
  const AttentionOps& (*ops)();
  bool runs;
};

// Best first. A variant that the CPU lacks is listed as such and never called.
template <class Visit>
void each_attention_variant(Visit visit) {
#if defined(__x86_64__)
  const Isa best = best_isa();
  const bool wide = best == Isa::kAvx512, narrow = best != Isa::kPortable && __builtin_cpu_supports("f16c");
  const bool bytes = wide && __builtin_cpu_supports("avx512vnni");
  const bool pairs = bytes && __builtin_cpu_supports("avx512bf16");
  visit(AttentionVariant{"avx512amx", attention_ops_avx512amx, pairs && has_tiles()});
  const AttentionVariant by_pairs = {"avx512pairs", pairs ? attention_ops_avx512pairs : attention_ops_avx512vnni, bytes};
  if (multiplies_pairs_fast()) visit(by_pairs);
  visit(AttentionVariant{"avx512vnni", attention_ops_avx512vnni, bytes});
  if (!multiplies_pairs_fast()) visit(by_pairs);
  visit(AttentionVariant{"avx512", attention_ops_avx512, wide});
  visit(AttentionVariant{"avxvnni", attention_ops_avxvnni, narrow && __builtin_cpu_supports("avxvnni")});
  visit(AttentionVariant{"avx2", attention_ops_avx2, narrow});
#endif
  visit(AttentionVariant{"portable", attention_ops_portable, true});
}

// The variant by name; one that this CPU cannot run is refused, never executed.
inline const AttentionOps& attention_ops(const std::string& name) {
  const AttentionOps* found = nullptr;
  bool known = name == "auto";
  each_attention_variant([&](const AttentionVariant& v) {
    known = known || name == v.name;
    if (!found && v.runs && (name == "auto" || name == v.name)) found = &v.ops();
  });
  if (!known)
    throw std::invalid_argument(unknown_isa(name));
  if (!found) throw std::invalid_argument("this CPU lacks " + name);
  return *found;
}

}  // namespace ridgeline
