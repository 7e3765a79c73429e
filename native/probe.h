// What this machine can do, measured with nothing else in the way: reading memory and multiplying.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace ridgeline {

// One repetition. `per_s`: bytes or operations per second of all threads together. `cpu_share`: CPU time
// of the threads over the time from the first one's start to the last one's end; below 1, something else held the
// cores.
struct Rate {
  double per_s;
  double cpu_share;
};

// Stream through `total_bytes`, cut evenly among the threads, `repetitions` times; each repetition reads
// the buffer as often as it takes to last `min_s`.
std::vector<Rate> read_rates(size_t total_bytes, int num_threads, int repetitions, double min_s);

// Independent multiply-adds in registers, nothing loaded: the arithmetic peak. A multiply-add counts 2.
// Kinds: those of multiply_kinds, and what the linears are held against: "int4" (4-bit weights by bytes)
// and "int16" (8-bit weights by bytes), each the best sequence of this CPU that is exact at full range, and "bf16"
// (weights of bfloat16 by floats: as float32, or by tiles on three terms, which count once); "bf16_kv": keys and values of
// bfloat16, likewise, or by pairs of them.
std::vector<Rate> multiply_rates(const std::string& kind, int num_threads, int repetitions, double min_s);

// The kinds that this CPU runs, best instruction chosen: "float32", and "int8" where it has one for bytes.
std::vector<std::string> multiply_kinds();

// Which variant of the kernels multiplies so on this CPU ("avxvnni", …); "" where nothing does.
std::string multiply_isa(const std::string& kind);

}  // namespace ridgeline
