// Elementary functions on vectors, for attention.
#pragma once
#include "simd/simd.h"

namespace ridgeline {
namespace {

constexpr float kLog2E = 1.44269504f;

// 2^x for x <= 0, by a polynomial on [-0.5, 0.5]: relative error 1e-7, exact at 0. Below -127 and
// for NaN it is 0, so that a masked score (-inf) contributes exactly nothing.
inline Vf exp2_nonpositive(Vf x) {
  x = max_f(x, set_f(-127.0f));
  const Vf n = round_f(x);
  const Vf r = sub_f(x, n);
  Vf p = set_f(1.534581242594868e-4f);
  p = mul_add_f(p, r, set_f(1.3399930903688073e-3f));
  p = mul_add_f(p, r, set_f(9.618489071726799e-3f));
  p = mul_add_f(p, r, set_f(5.550328642129898e-2f));
  p = mul_add_f(p, r, set_f(0.24022646248340607f));
  p = mul_add_f(p, r, set_f(0.6931471824645996f));
  p = mul_add_f(p, r, set_f(1.0f));
  return scale_by_power_of_two(p, n);
}

inline float exp2_nonpositive(float x) {
  alignas(64) float out[kLanes];
  store_f(out, exp2_nonpositive(set_f(x)));
  return out[0];
}

inline Vf tanh_f(Vf x) {
  const Vf t = exp2_nonpositive(mul_f(abs_f(x), set_f(-2 * kLog2E)));
  return copy_sign_f(div_f(sub_f(set_f(1.0f), t), add_f(set_f(1.0f), t)), x);
}

}  // namespace
}  // namespace ridgeline
