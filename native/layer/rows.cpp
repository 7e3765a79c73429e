// Rows on their way into a product, and products in the pieces that threads take.
#include <string.h>

#include <algorithm>

#include "layer/segment.h"

namespace ridgeline {
namespace {

constexpr int kLineFloats = 16;
constexpr int kMaxRowsAside = 128;
constexpr int64_t kChunkBytes = 128 << 10;  // of a weight: what a thread claims at once
// With so few rows, beginning a chunk costs less than waiting for the last one to end.
constexpr int64_t kFewRowsChunkBytes = 64 << 10;
constexpr int kFewRows = 2;
constexpr int64_t kChunksPerThread = 4, kManyRowsPanels = 64;  // with many rows

// Tiles of panels claimed at once: enough bytes to stream, few enough that threads end together. A
// product of many rows that itself cuts them into parts that fit a core's cache (bfloat16 by AMX)
// takes more, since every chunk reads all parts again.
int64_t tiles_per_chunk(const Frame& frame, const PackedWeight& weight) {
  const bool few_rows = frame.num_rows * weight.digits <= kFewRows;
  const int64_t per_tile = frame.linear->panels_per_tile;
  const int64_t bytes = few_rows ? kFewRowsChunkBytes : kChunkBytes;
  const int64_t tiles = std::max<int64_t>(1, bytes / (weight.panel_bytes() * per_tile));
  if (frame.num_rows < kManyRows || !frame.linear->cached_row_bytes ||
      weight.kind != WeightKind::kBf16)
    return tiles;
  const int64_t share = weight.num_panels() / (kChunksPerThread * frame.num_threads);
  return std::max<int64_t>(tiles, std::min<int64_t>(kManyRowsPanels, share) / per_tile);
}

// Prepared rows; rows are counted with their digits.
PreparedRows digit_rows(const Frame& frame, const PreparedBuffers& buffers,
                        const PackedWeight& weight, int64_t first_row, int num_rows) {
  const int bytes = frame.linear->x_bytes(weight.kind);
  const int64_t at = first_row * weight.padded_in(), groups = first_row * weight.num_groups();
  if (takes_floats(weight.kind)) {
    const QuantRows none = {nullptr, nullptr, nullptr, num_rows, weight.num_in, weight.group, 0};
    return {none, buffers.wide.as<char>() + at * bytes, bytes};
  }
  float* const pair_offsets = uses_pairs(*frame.linear, weight, num_rows)
                                  ? buffers.pair_offsets.as<float>() + groups
                                  : nullptr;
  const QuantRows rows = {buffers.values.as<int8_t>() + at,
                          buffers.scales.as<float>() + groups,
                          buffers.sums.as<int32_t>() + groups,
                          num_rows,
                          weight.num_in,
                          weight.group,
                          max_row_value(weight.kind),
                          pair_offsets};
  if (bytes == 2) return {rows, buffers.wide.as<int16_t>() + at, bytes};
  return {rows, rows.values, bytes};
}

void reserve_digit_rows(const Frame& frame, PreparedBuffers& buffers, const PackedWeight& weight,
                        int64_t num_rows) {
  const int64_t elements = num_rows * weight.padded_in(), groups = num_rows * weight.num_groups();
  const int bytes = frame.linear->x_bytes(weight.kind);
  if (bytes != 1) buffers.wide.reserve(bytes * elements);
  if (takes_floats(weight.kind)) return;
  buffers.values.reserve(elements);
  buffers.scales.reserve(4 * groups);
  buffers.sums.reserve(4 * groups);
  if (frame.linear->pair_min_rows && weight.kind == WeightKind::kInt4)
    buffers.pair_offsets.reserve(4 * groups);
}

// The number of rows that the frame's are laid out as. A row's next block is this many times 32
// bytes away; a power of two, as prompts often have, would put all blocks of a row, and of those
// multiplied with it, into the same few sets of the caches. AMX variants (the only ones with
// cached_row_bytes) divide rows differently.
int padded_num_rows(const Frame& frame, const PackedWeight& weight) {
  const int num = frame.num_rows * weight.digits;
  if (num <= kManyRows || frame.linear->cached_row_bytes) return num;
  return ((num + kBlock - 1) / kBlock | 1) * kBlock;
}

// `num` floats that belong to the calling thread.
float* thread_floats(int64_t num) {
  thread_local GrowingBuffer buffer;
  return static_cast<float*>(buffer.reserve(4 * num));
}

}  // namespace

// Prepared rows are interleaved, 32 bytes of each, so that threads with neighbouring rows would
// take cache lines from each other. Few rows are one item per thread, so that buffered results are
// copied back once; but fewer per item where a thread would be left without any.
int rows_per_item(const Frame& frame) {
  const int share = frame.num_rows / frame.num_threads;
  return share >= kLineFloats ? 4 : share >= 4 ? (share + 1) / 2 * 2 : 1;
}
int64_t num_row_items(const Frame& frame) {
  return (frame.num_rows + rows_per_item(frame) - 1) / rows_per_item(frame);
}

int64_t num_row_parts(const Frame& frame, const PackedWeight& weight) {
  const int64_t cached = frame.linear->cached_row_bytes;
  const int64_t bytes = int64_t{frame.num_rows} * weight.digits * weight.padded_in();
  if (!cached || takes_floats(weight.kind)) return 1;
  return std::max<int64_t>(1, (bytes + cached - 1) / cached);
}

PreparedRows rows_for(const Frame& frame, const PreparedBuffers& from, const PackedWeight& weight,
                      int64_t first_row, int num_rows) {
  return digit_rows(frame, from, weight, first_row * weight.digits, num_rows * weight.digits);
}

void reserve_rows(const Frame& frame, PreparedBuffers& buffers, const PackedWeight& weight,
                  int64_t num_rows) {
  reserve_digit_rows(frame, buffers, weight, num_rows * weight.digits);
}

PreparedRows all_rows_for(const Frame& frame, const PreparedBuffers& from,
                          const PackedWeight& weight) {
  return digit_rows(frame, from, weight, 0, padded_num_rows(frame, weight));
}

void reserve_all_rows(const Frame& frame, PreparedBuffers& buffers, const PackedWeight& weight) {
  reserve_digit_rows(frame, buffers, weight, padded_num_rows(frame, weight));
}

void prepare(const Frame& frame, const PackedWeight& weight, const PreparedRows& to, int row,
             const float* x, int first, int end) {
  const int64_t start = static_cast<int64_t>(first) * weight.group;
  const int64_t stop = std::min<int64_t>(weight.num_in, int64_t{weight.group} * end);
  const int count = static_cast<int>(stop - start);
  if (takes_floats(weight.kind)) {
    char* at = static_cast<char*>(to.x) + start * to.rows.num_rows * to.bytes;
    return frame.linear->arrange(weight.kind, x, count, row, to.rows.num_rows, at);
  }
  QuantRows part = to.rows;
  const int64_t place = start * part.num_rows;
  const int64_t group_place = static_cast<int64_t>(first) * part.num_rows;
  part.values += place;
  part.scales += group_place;
  part.sums += group_place;
  if (part.pair_offsets) part.pair_offsets += group_place;
  part.num_in = count;
  float* const rest = weight.digits > 1 ? thread_floats(count) : nullptr;
  quantise_digits(*frame.linear, part, weight.digits, x, row, rest);
  for (int digit_row = row * weight.digits; digit_row < (row + 1) * weight.digits; ++digit_row) {
    if (part.pair_offsets) frame.linear->pair(part, digit_row, part.values);
    if (to.bytes == 2) frame.linear->widen(part, digit_row, static_cast<int16_t*>(to.x) + place);
  }
}

int ScalesAside::floats(const PackedWeight& weight) {
  return has_groups(weight.kind) ? 3 * kMaxRowsAside * weight.num_groups() : 0;
}

ScalesAside::ScalesAside(const Frame& frame, const PackedWeight& weight, const PreparedRows& to,
                         float* memory)
    : to_(to), aside_(to) {
  const bool shares_lines =
      frame.num_threads > 1 && frame.num_rows / frame.num_threads < kLineFloats;
  if (!has_groups(weight.kind) || !shares_lines || frame.num_rows * weight.digits > kMaxRowsAside)
    return;
  digits_ = weight.digits;
  const int64_t num = int64_t{kMaxRowsAside} * weight.num_groups();
  aside_.rows.scales = memory;
  aside_.rows.sums = reinterpret_cast<int32_t*>(memory + num);
  if (to.rows.pair_offsets) aside_.rows.pair_offsets = memory + 2 * num;
}

void ScalesAside::copy_back(int first_row, int end_row) const {
  const QuantRows &to = to_.rows, &from = aside_.rows;
  if (to.scales == from.scales) return;
  const size_t bytes = sizeof(float) * static_cast<size_t>((end_row - first_row) * digits_);
  for (int64_t g = 0, at = first_row * digits_; g < to.num_groups(); ++g, at += to.num_rows) {
    memcpy(to.scales + at, from.scales + at, bytes);
    memcpy(to.sums + at, from.sums + at, bytes);
    if (to.pair_offsets) memcpy(to.pair_offsets + at, from.pair_offsets + at, bytes);
  }
}

void multiply(const Frame& frame, const PackedWeight& weight, const PreparedRows& rows,
              int first_row, int end_row, float* out, int64_t chunk) {
  const LinearArgs args = {weight,  rows.x,         rows.rows.scales,      rows.rows.sums,
                           out,     weight.num_out, rows.rows.num_rows,    first_row,
                           end_row, false,          rows.rows.pair_offsets};
  const int per = static_cast<int>(tiles_per_chunk(frame, weight)) * frame.linear->panels_per_tile;
  const int first = static_cast<int>(chunk) * per, end = std::min(first + per, weight.num_panels());
  if (weight.digits == 1) return frame.linear->multiply(args, first, end);
  const int64_t floats = digit_floats(weight, end_row - first_row, end - first);
  multiply_digits(*frame.linear, args, first, end, thread_floats(floats));
}

void multiply_block(const Frame& frame, const PackedWeight& weight, const PreparedRows& rows,
                    int first, int end, int panel, int end_panel, float* out, int stride) {
  const PackedWeight part = panels_of(weight, panel, end_panel);
  const LinearArgs args = {part, rows.x, rows.rows.scales,      rows.rows.sums,
                           out,  stride, rows.rows.num_rows,    first,
                           end,  true,   rows.rows.pair_offsets};
  if (part.digits == 1) return frame.linear->multiply(args, 0, part.num_panels());
  const int64_t floats = digit_floats(part, end - first, part.num_panels());
  multiply_digits(*frame.linear, args, 0, part.num_panels(), thread_floats(floats));
}

int64_t num_chunks(const Frame& frame, const PackedWeight& weight) {
  const int per_tile = frame.linear->panels_per_tile;
  const int64_t tiles = (weight.num_panels() + per_tile - 1) / per_tile;
  const int64_t per = tiles_per_chunk(frame, weight);
  return (tiles + per - 1) / per;
}

}  // namespace ridgeline
