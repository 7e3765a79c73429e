// Packing weights, and dividing products among threads.
#include "linear/linear.h"

#include <string.h>

#include "linear/sparse24.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

namespace ridgeline {
namespace {

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<void, Free>;

Buffer buffer(int64_t bytes) {
  Buffer out(std::aligned_alloc(64, static_cast<size_t>(round_up(bytes, 64))));
  if (!out) throw std::bad_alloc();
  return out;
}

// Waking a thread costs as much as some million multiply-adds: small products stay on one.
int worthwhile_threads(const PackedWeight& weight, int num_rows, int num_threads) {
  const int64_t macs = static_cast<int64_t>(weight.num_out) * weight.num_in * num_rows;
  return static_cast<int>(std::min<int64_t>((macs >> 22) + 1, num_threads));
}

int worthwhile_threads(int64_t elements, int num_threads) {
  return static_cast<int>(std::min<int64_t>((elements >> 18) + 1, num_threads));
}

// Divides tiles of panels into even, contiguous shares: each thread streams through its own piece
// of the weight.
void multiply_all(const LinearOps& ops, const LinearArgs& args, int num_threads) {
  const int panels = args.weight.num_panels(), per = ops.panels_per_tile;
  const int tiles = (panels + per - 1) / per;
  const int threads = std::min(worthwhile_threads(args.weight, args.num_rows, num_threads), tiles);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int t = 0; t < threads; ++t) {
    const int first = static_cast<int>(static_cast<int64_t>(tiles) * t / threads) * per;
    const int end = static_cast<int>(static_cast<int64_t>(tiles) * (t + 1) / threads) * per;
    ops.multiply(args, first, std::min(end, panels));
  }
}

float half_to_float(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(mantissa) * 0x1p-24f;
  const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
  float out;
  memcpy(&out, &bits, sizeof out);
  return out;
}

// Where input k of output n is packed.
struct Place {
  int64_t byte;
  bool high;  // int4: in the high nibble
};

Place place_of(const PackedWeight& w, int n, int k) {
  const int per_line = kLineBytes * 8 / w.bits() / kPanel;  // inputs of one line: 8, 4, 2 or 1
  const int64_t line =
      n / kPanel * w.panel_bytes() + static_cast<int64_t>(k / per_line) * kLineBytes;
  const int o = n % kPanel, j = k % per_line;
  if (w.kind == WeightKind::kInt4) return {line + 4 * o + j % 4, j >= 4};
  if (w.bits() == 8) return {line + 4 * o + j, false};
  return {line + 4 * o + 2 * j, false};
}

void pack_row(const PackedWeight& w, int n, const void* q, uint8_t* lines) {
  const int64_t row = static_cast<int64_t>(n) * w.num_in;
  if (w.kind == WeightKind::kFp32) {  // whole models are packed here: no division per element
    uint8_t* to = lines + n / kPanel * w.panel_bytes() + 4 * (n % kPanel);
    for (int k = 0; k < w.num_in; ++k)
      memcpy(to + int64_t{kLineBytes} * k, static_cast<const float*>(q) + row + k, 4);
    return;
  }
  for (int k = 0; k < w.num_in; ++k) {
    const Place at = place_of(w, n, k);
    if (w.kind == WeightKind::kInt4) {
      const uint8_t nibble = static_cast<const uint8_t*>(q)[row + k] & 15;
      lines[at.byte] |= static_cast<uint8_t>(at.high ? nibble << 4 : nibble);
    } else if (w.bits() == 8) {
      lines[at.byte] = static_cast<uint8_t>(static_cast<const int8_t*>(q)[row + k] + 128);
    } else {
      memcpy(lines + at.byte, static_cast<const uint16_t*>(q) + row + k, 2);
    }
  }
}

// Four adjacent inputs of an output of int8_sparse24: a half byte of the block's mask, and two bytes.
struct SparseFour {
  int64_t mask, kept;  // bytes of the lines
  int shift;           // of the half byte

  SparseFour(const PackedWeight& w, int n, int four) {
    const int64_t block = n / kPanel * w.panel_bytes() +
                          static_cast<int64_t>(four / kSparseLines) * kSparseBlockBytes;
    const int line = four % kSparseLines, o = n % kPanel;
    mask = block + 8 * line + o / 2;
    shift = 4 * (o % 2);
    kept = block + kSparseMaskBytes + kLineBytes / 2 * line + 2 * o;
  }
};

void pack_sparse_row(const PackedWeight& w, int n, const int8_t* q, uint8_t* lines) {
  for (int four = 0; four < w.padded_in() / 4; ++four) {
    int8_t own[4] = {};
    for (int j = 0; j < 4 && 4 * four + j < w.num_in && n < w.num_out; ++j)
      own[j] = q[static_cast<int64_t>(n) * w.num_in + 4 * four + j];
    int mask = 0, count = 0;
    for (bool zeros : {false, true})  // zeros are stored where fewer than two are not
      for (int j = 0; j < 4; ++j)
        if (count < 2 && (own[j] == 0) == zeros) mask |= 1 << j, ++count;
    const SparseFour at(w, n, four);
    lines[at.mask] |= static_cast<uint8_t>(mask << at.shift);
    uint8_t* kept = lines + at.kept;
    for (int j = 0; j < 4; ++j)
      if (mask >> j & 1) *kept++ = static_cast<uint8_t>(own[j] + 128);
  }
}

int sparse_value(const PackedWeight& w, int n, int k) {
  const SparseFour at(w, n, k / 4);
  const int mask = w.lines[at.mask] >> at.shift & 15, j = k % 4;
  if (!(mask >> j & 1)) return 0;
  return w.lines[at.kept + __builtin_popcount(mask & ((1 << j) - 1))] - 128;
}

// The index of an output's group (or span), of `num` per panel, in arrays [panels][num][16].
int64_t entry_of(int row, int num, int at) {
  return (static_cast<int64_t>(row / kPanel) * num + at) * kPanel + row % kPanel;
}

// The scale or minimum of input k.
float group_scale(const PackedWeight& w, const uint16_t* halves, const int8_t* steps, int row,
                  int k) {
  const int group = k / w.group;
  const float half =
      half_to_float(halves[entry_of(row, w.num_spans(), group / w.groups_per_span())]);
  return steps ? half * static_cast<float>(steps[entry_of(row, w.num_groups(), group)]) : half;
}

// The integer at a place, its zero subtracted.
int value_at(const PackedWeight& w, const Place& at, int row, int k) {
  if (w.kind != WeightKind::kInt4) return w.lines[at.byte] - 128;
  const int q = at.high ? w.lines[at.byte] >> 4 : w.lines[at.byte] & 15;
  if (w.zeros) return q - w.zeros[entry_of(row, w.num_groups(), k / w.group)];
  return w.mins ? q : q - 8;
}

}  // namespace

void quantise_rows(const LinearOps& ops, const float* x, int64_t x_stride, float row_scale,
                   const QuantRows& to, int num_threads) {
  const int threads =
      worthwhile_threads(static_cast<int64_t>(to.num_rows) * to.num_in, num_threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int row = 0; row < to.num_rows; ++row) ops.quantise(x + row * x_stride, row_scale, to, row);
}

namespace {

// Quantised rows in the form in which the ops multiply them by a weight.
struct PreparedRows {
  Buffer wide, values, pairs;
  LinearArgs args;

  PreparedRows(const LinearOps& ops, const PackedWeight& weight, const QuantRows& rows,
               int num_threads)
      : args{weight, rows.values,   rows.scales, rows.sums,    nullptr,
             0,      rows.num_rows, 0,           rows.num_rows} {
    const int64_t elements = static_cast<int64_t>(rows.num_rows) * rows.padded_in();
    const int threads = worthwhile_threads(elements, num_threads);
    if (uses_pairs(ops, weight, rows.num_rows)) {
      values = buffer(elements);  // the caller may multiply the rows by other weights too
      pairs = buffer(4 * static_cast<int64_t>(rows.num_rows) * rows.num_groups());
      QuantRows from = rows;
      from.pair_offsets = static_cast<float*>(pairs.get());
      int8_t* to = static_cast<int8_t*>(values.get());
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
      for (int row = 0; row < rows.num_rows; ++row) ops.pair(from, row, to);
      args.x = to;
      args.pair_offsets = from.pair_offsets;
    }
    if (ops.x_bytes(weight.kind) == 2) {
      wide = buffer(2 * elements);
      int16_t* to = static_cast<int16_t*>(wide.get());
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
      for (int row = 0; row < rows.num_rows; ++row) ops.widen(rows, row, to);
      args.x = to;
    }
  }
};

constexpr int kDigitPanels = 8;  // panels multiplied at once

// All rows in digits.
struct DigitRows {
  Buffer values, scales, sums, rest;
  QuantRows rows = {};
  int64_t rest_stride;

  DigitRows(const PackedWeight& weight, int num_rows)
      : rest_stride(round_up(weight.num_in, kPanel)) {
    const int64_t all = int64_t{num_rows} * weight.digits, groups = all * weight.num_groups();
    values = buffer(all * weight.padded_in());
    scales = buffer(4 * groups);
    sums = buffer(4 * groups);
    rest = buffer(4 * num_rows * rest_stride);
    rows.values = static_cast<int8_t*>(values.get());
    rows.scales = static_cast<float*>(scales.get());
    rows.sums = static_cast<int32_t*>(sums.get());
    rows.num_rows = num_rows * weight.digits;
    rows.num_in = weight.num_in;
    rows.group = weight.group;
    rows.max_value = max_row_value(weight.kind);
  }
  float* rest_of(int row) const { return static_cast<float*>(rest.get()) + row * rest_stride; }
};

}  // namespace

void linear_quantised(const LinearOps& ops, const PackedWeight& weight, const QuantRows& rows,
                      float* out, int64_t out_stride, int num_threads) {
  PreparedRows prepared(ops, weight, rows, num_threads);
  prepared.args.out = out;
  prepared.args.out_stride = out_stride;
  multiply_all(ops, prepared.args, num_threads);
}

void multiply_digits(const LinearOps& ops, const LinearArgs& args, int first_panel, int end_panel,
                     float* scratch) {
  LinearArgs part = args;
  part.weight = panels_of(args.weight, first_panel, end_panel);
  const int digits = part.weight.digits, count = part.weight.num_out,
            panels = part.weight.num_panels();
  const float* const bias = part.weight.bias;
  part.weight.bias = nullptr;
  part.out = scratch;
  part.out_stride = int64_t{panels} * kPanel;
  part.read_soon = true;
  float* out = args.out + int64_t{first_panel} * kPanel;
  for (int row = args.first_row; row < args.end_row; row += kDigitRows) {
    const int end = std::min(args.end_row, row + kDigitRows);
    part.first_row = row * digits;
    part.end_row = end * digits;
    ops.multiply(part, 0, panels);
    for (int r = row; r < end; ++r, out += args.out_stride)
      ops.sum_digits(scratch + (r - row) * digits * part.out_stride, digits, part.out_stride, bias,
                     count, out);
  }
}

void quantise_digits(const LinearOps& ops, const QuantRows& to, int digits, const float* x, int row,
                     float* rest) {
  for (int d = 0; d < digits; ++d, x = rest) {
    ops.quantise(x, 0.0f, to, row * digits + d);
    if (d + 1 < digits) ops.subtract_quantised(x, to, row * digits + d, rest);
  }
}

void linear_digits(const LinearOps& ops, const PackedWeight& weight, const float* x,
                   int64_t x_stride, int num_rows, float* out, int64_t out_stride,
                   int num_threads) {
  DigitRows digits(weight, num_rows);
  const int quantising =
      worthwhile_threads(static_cast<int64_t>(digits.rows.num_rows) * weight.num_in, num_threads);
#pragma omp parallel for num_threads(quantising) schedule(static) if (quantising > 1)
  for (int row = 0; row < num_rows; ++row)
    quantise_digits(ops, digits.rows, weight.digits, x + row * x_stride, row, digits.rest_of(row));
  PreparedRows prepared(ops, weight, digits.rows, num_threads);
  LinearArgs args = prepared.args;
  args.out = out;
  args.out_stride = out_stride;
  args.end_row = num_rows;
  const int panels = weight.num_panels(), units = (panels + kDigitPanels - 1) / kDigitPanels;
  const int threads =
      std::min(worthwhile_threads(weight, digits.rows.num_rows, num_threads), units);
  const int64_t each = digit_floats(weight, num_rows, kDigitPanels);
  Buffer scratch = buffer(4 * each * threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int t = 0; t < threads; ++t)
    for (int unit = static_cast<int>(int64_t{units} * t / threads);
         unit < int64_t{units} * (t + 1) / threads; ++unit) {
      const int first = unit * kDigitPanels;
      multiply_digits(ops, args, first, std::min(first + kDigitPanels, panels),
                      static_cast<float*>(scratch.get()) + each * t);
    }
}

void linear_float(const LinearOps& ops, const PackedWeight& weight, const float* x,
                  int64_t x_stride, int num_rows, float* out, int64_t out_stride, int num_threads) {
  // Some rows at a time: the blocks of very many could be a power of two apart, all in the same few
  // sets of the cache.
  constexpr int kPiece = 96;
  const int most = std::min(num_rows, kPiece);
  Buffer blocks = buffer(int64_t{ops.x_bytes(weight.kind)} * most * weight.padded_in());
  void* to = blocks.get();
  for (int first = 0; first < num_rows; first += kPiece) {
    const int count = std::min(num_rows - first, kPiece);
    const float* from = x + first * x_stride;
    const int threads =
        worthwhile_threads(static_cast<int64_t>(count) * weight.padded_in(), num_threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int row = 0; row < count; ++row)
      ops.arrange(weight.kind, from + row * x_stride, weight.num_in, row, count, to);
    multiply_all(
        ops, {weight, to, nullptr, nullptr, out + first * out_stride, out_stride, count, 0, count},
        num_threads);
  }
}

PackedWeight panels_of(const PackedWeight& weight, int first, int end) {
  PackedWeight part = weight;
  const auto skip = [first](auto*& from, int64_t per_panel) {
    if (from) from += first * per_panel;
  };
  const int64_t groups = int64_t{weight.num_groups()} * kPanel,
                spans = int64_t{weight.num_spans()} * kPanel;
  skip(part.lines, weight.panel_bytes());
  skip(part.scales, spans);
  skip(part.mins, spans);
  skip(part.zeros, groups);
  skip(part.steps, groups);
  skip(part.min_steps, groups);
  skip(part.factors, kPanel);
  skip(part.bias, kPanel);
  part.num_out = std::min(end * kPanel, weight.num_out) - first * kPanel;
  return part;
}

void pack_lines(const PackedWeight& shape, const void* q, uint8_t* lines) {
  const int panels = shape.num_panels();
  const int pad = shape.bits() == 8 ? 128 : 0;
#pragma omp parallel for schedule(static)
  for (int p = 0; p < panels; ++p) {
    memset(lines + p * shape.panel_bytes(), pad, static_cast<size_t>(shape.panel_bytes()));
    if (shape.kind == WeightKind::kInt8Sparse24) {
      for (int n = p * kPanel; n < (p + 1) * kPanel; ++n)
        pack_sparse_row(shape, n, static_cast<const int8_t*>(q), lines);
      continue;
    }
    for (int n = p * kPanel; n < std::min((p + 1) * kPanel, shape.num_out); ++n)
      pack_row(shape, n, q, lines);
  }
}

bool is_two_of_four(const int8_t* q, int num_out, int num_in) {
  for (int n = 0; n < num_out; ++n, q += num_in)
    for (int four = 0; four < num_in; four += 4) {
      int count = 0;
      for (int k = four; k < std::min(four + 4, num_in); ++k) count += q[k] != 0;
      if (count > 2) return false;
    }
  return true;
}

uint8_t* thread_lines(int64_t bytes) {
  thread_local Buffer memory;
  thread_local int64_t size = 0;
  if (size < bytes) {
    memory = buffer(bytes);
    size = bytes;
  }
  return static_cast<uint8_t*>(memory.get());
}

void unpack_row(const PackedWeight& w, int row, float* to) {
  const float factor = w.factors ? w.factors[row] : 1.0f;
  for (int k = 0; k < w.num_in; ++k) {
    if (w.kind == WeightKind::kInt8Sparse24) {
      to[k] = static_cast<float>(sparse_value(w, row, k)) * factor;
      continue;
    }
    const Place at = place_of(w, row, k);
    if (has_groups(w.kind)) {
      const float y =
          static_cast<float>(value_at(w, at, row, k)) * group_scale(w, w.scales, w.steps, row, k);
      to[k] = (w.mins ? y + group_scale(w, w.mins, w.min_steps, row, k) : y) * factor;
    } else if (w.kind == WeightKind::kInt8) {
      to[k] = static_cast<float>(w.lines[at.byte] - 128) * factor;
    } else if (w.kind == WeightKind::kFp32) {
      memcpy(to + k, w.lines + at.byte, 4);
    } else {
      uint32_t bits = 0;
      memcpy(reinterpret_cast<char*>(&bits) + 2, w.lines + at.byte, 2);
      memcpy(to + k, &bits, 4);
    }
  }
}

}  // namespace ridgeline
