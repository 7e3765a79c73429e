// The instructions of int4_winograd.h, as assembly that stays in its order: two additions and one
// product, again and again, fill all ports of a Zen 4. What comes between them costs up to twice
// its share when several stand in a row, and little more than its share between products (measured;
// as if an operation were given its port when it is issued). GCC 12 would also gather the sums of
// several rows and spill them. native/tests/emulation has a twin of this file.
#pragma once
#include "linear/linear.h"
#include "simd/avx512.h"
#include "simd/compiler.h"

namespace ridgeline {
namespace {

// sum + dot(first + high, second + low), of bytes.
RL_INLINE Vi dot_of_sums(Vi sum, Vi first, Vi second, Vi low, Vi high) {
  Vi a, b;
  asm volatile("vpaddb %3, %5, %1\n\tvpaddb %4, %6, %2\n\tvpdpbusd %2, %1, %0"
               : "+v"(sum), "=&v"(a), "=&v"(b)
               : "v"(first), "v"(second), "v"(high), "v"(low));
  return sum;
}
RL_INLINE Vi ordered_dot_memory(Vi sum, Vi weights, const uint8_t* four) {
  asm volatile("vpdpbusd %2%{1to16%}, %1, %0"
               : "+v"(sum)
               : "v"(weights), "m"(*reinterpret_cast<const int32_t (*)[1]>(four)));
  return sum;
}
RL_INLINE Vi ordered_broadcast(const uint8_t* p) {
  Vi v;
  asm volatile("vpbroadcastd %1, %0" : "=v"(v) : "m"(*reinterpret_cast<const int32_t (*)[1]>(p)));
  return v;
}
RL_INLINE Vi ordered_load(const void* p) {
  Vi v;
  asm volatile("vmovdqu64 %1, %0" : "=v"(v) : "m"(*static_cast<const uint8_t (*)[kLineBytes]>(p)));
  return v;
}
RL_INLINE Vi ordered_shift_4(Vi v) {
  Vi out;
  asm volatile("vpsrlw $4, %1, %0" : "=v"(out) : "v"(v));
  return out;
}
RL_INLINE Vi ordered_and(Vi v, Vi mask) {
  Vi out;
  asm volatile("vpandd %2, %1, %0" : "=v"(out) : "v"(v), "v"(mask));
  return out;
}
// y += (float(sum) - *offset) * (scale * *row_scale); `sum` has the bits of a float already, see
// kIntegerOffset.
RL_INLINE void ordered_scale_sum(Vi sum, Vf scale, const float* offset, const float* row_scale,
                                 float* y) {
  Vf by;
  asm volatile(
      "vsubps %3%{1to16%}, %0, %0\n\tvmulps %4%{1to16%}, %5, %1\n\t"
      "vfmadd213ps %2, %1, %0\n\tvmovups %0, %2"
      : "+v"(sum), "=&v"(by), "+m"(*reinterpret_cast<float (*)[kPanel]>(y))
      : "m"(*offset), "m"(*row_scale), "v"(scale));
}

}  // namespace
}  // namespace ridgeline
