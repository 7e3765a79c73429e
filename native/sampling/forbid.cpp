#include "sampling/forbid.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

namespace ridgeline {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();

// For each byte of bits: all ones for the tokens that are kept, zero for the others.
using KeptLanes = std::array<std::array<uint32_t, 8>, 256>;

KeptLanes kept_lanes() {
  KeptLanes lanes{};
  for (int byte = 0; byte < 256; ++byte)
    for (int i = 0; i < 8; ++i) lanes[byte][i] = byte >> i & 1 ? ~0u : 0u;
  return lanes;
}

// Eight tokens without a branch: masks of half the vocabulary have no pattern to predict.
void forbid_eight(float* x, const std::array<uint32_t, 8>& kept) {
  uint32_t bits[8], forbidden;
  std::memcpy(&forbidden, &kForbidden, sizeof forbidden);
  std::memcpy(bits, x, sizeof bits);
  for (int i = 0; i < 8; ++i) bits[i] = (bits[i] & kept[i]) | (forbidden & ~kept[i]);
  std::memcpy(x, bits, sizeof bits);
}

}  // namespace

void forbid_tokens(float* x, int64_t width, const uint32_t* words) {
  static const KeptLanes lanes = kept_lanes();
  int64_t i = 0;
  for (; i + 32 <= width; i += 32) {
    const uint32_t word = words[i / 32];
    if (word == ~0u) continue;
    if (word == 0) {
      std::fill(x + i, x + i + 32, kForbidden);
      continue;
    }
    for (int part = 0; part < 4; ++part)
      forbid_eight(x + i + 8 * part, lanes[word >> (8 * part) & 255]);
  }
  for (; i < width; ++i)
    if (!(words[i / 32] >> (i % 32) & 1)) x[i] = kForbidden;
}

}  // namespace ridgeline
