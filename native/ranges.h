// The turn of one group in `ridgeline.compress.formats.range_search`: of the scales and zero-points that it is offered, which
// leaves the least error in a linear's output, while the row's other groups stand still.
//
// Legend: M rows (outputs of the linear), J inputs of the group, P = J in whole vectors of 16, C scales, Z zeros.
#pragma once

namespace ridgeline {

constexpr int kMostGroup = 128;      // J
constexpr int kMostCandidates = 59;  // C * Z; with the error that is there whole register tiles

// A row with error e costs e H e' + 2 others e', H the group's own block of second moments, `others` what the
// row's other errors put on its inputs. A candidate's error is (clamp(round(w / scale + zero)) - zero) * scale - w.
struct RangesArgs {
  const float* weight;  // [M, J], rows `stride` apart
  float* error;         // [M, J], rows `stride` apart; the best candidate's, where one is better
  const float* others;  // [M, J]
  const float* moment;  // [J, P], symmetric in [J, J], zeros beyond
  const float* scales;  // [M, C], none 0
  const float* zeros;   // [M, Z]
  int* chosen;          // [M]: scale * Z + zero of the first of the best; -1: the error that was there
  long stride;
  int num_rows, size, num_scales, num_zeros, num_threads;
  float low, high;
};

void choose_ranges_portable(const RangesArgs& args);
#if defined(__x86_64__)
void choose_ranges_avx2(const RangesArgs& args);
void choose_ranges_avx512(const RangesArgs& args);
#endif

}  // namespace ridgeline
