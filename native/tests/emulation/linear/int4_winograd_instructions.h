// Twin of native/linear/int4_winograd_instructions.h.
#pragma once
#include "linear/linear.h"
#include "simd/avx512.h"

namespace ridgeline {
namespace {

inline Vi dot_of_sums(Vi sum, Vi first, Vi second, Vi low, Vi high) {
  return dot_u8s8(sum, _mm512_add_epi8(first, high), _mm512_add_epi8(second, low));
}
inline Vi ordered_dot_memory(Vi sum, Vi weights, const uint8_t* four) {
  return dot_u8s8_memory(sum, weights, four);
}
inline Vi ordered_broadcast(const uint8_t* p) { return broadcast_4(p); }
inline Vi ordered_load(const void* p) { return load_i(p); }
inline Vi ordered_shift_4(Vi v) { return _mm512_srli_epi16(v, 4); }
inline Vi ordered_and(Vi v, Vi mask) { return _mm512_and_si512(v, mask); }
inline void ordered_scale_sum(Vi sum, Vf scale, const float* offset, const float* row_scale,
                              float* y) {
  const Vf value = _mm512_sub_ps(as_f(sum), set_f(*offset));
  store_f(y, fma_f(value, mul_f(scale, set_f(*row_scale)), load_f(y)));
}

}  // namespace
}  // namespace ridgeline
