// For one group of a quantised linear: of the scales and zero-points offered, those that leave the
// least error in the linear's output while the row's other groups stay fixed. One step of
// ridgeline.compress's coordinate descent.
//
// Legend: M rows (outputs of the linear), J inputs of the group, P = J in whole vectors of 16, C
// scales, Z zeros.
#pragma once

namespace ridgeline {

constexpr int kMaxSearchGroup = 128;  // J
constexpr int kMaxCandidates = 59;    // C * Z; with the current error they are whole register tiles

// A row with error e costs e H e' + 2 others e', where H is the group's own block of second moments
// and `others` is what the row's other errors contribute at its inputs. A candidate's error is
// (clamp(round(w / scale + zero)) - zero) * scale - w.
struct ScaleSearchArgs {
  const float* weight;  // [M, J], rows `stride` apart
  float* error;  // [M, J], rows `stride` apart; replaced by the best candidate's if it is better
  const float* others;  // [M, J]
  const float* moment;  // [J, P], symmetric in [J, J], zeros beyond
  const float* scales;  // [M, C], none 0
  const float* zeros;   // [M, Z]
  int* chosen;          // [M]: scale * Z + zero of the first of the best; -1: the current error
  long stride;
  int num_rows, size, num_scales, num_zeros, num_threads;
  float low, high;
};

void search_scales_portable(const ScaleSearchArgs& args);
#if defined(__x86_64__)
void search_scales_avx2(const ScaleSearchArgs& args);
void search_scales_avx512(const ScaleSearchArgs& args);
#endif

}  // namespace ridgeline
