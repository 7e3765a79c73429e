// What this machine can do, measured with nothing else in the way: reading memory, and multiplying.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace ridgeline {

// One repetition.
struct Rate {
  double per_s;  // bytes or operations per second, all threads together
  double
      cpu_share;  // the threads' CPU time over the wall time; below 1, something else had the cores
};

// Streams through `total_bytes`, cut evenly among the threads, `repetitions` times. Each repetition
// reads the buffer as often as it takes to last `min_s`.
std::vector<Rate> read_rates(size_t total_bytes, int num_threads, int repetitions, double min_s);

// Independent multiply-adds in registers, nothing loaded: the arithmetic peak. A multiply-add
// counts 2. Kinds: those of multiply_kinds, and those that the linears are compared with: "int4"
// (4-bit weights by bytes) and "int16" (8-bit weights by bytes), each the best sequence of this CPU
// that is exact at full range; "bf16" (bfloat16 weights by floats: as float32, or by AMX tiles on
// three terms, which count once); "bf16_kv" (bfloat16 keys and values: likewise, or by pairs).
// Throws std::invalid_argument where the CPU has no instruction for the kind.
std::vector<Rate> multiply_rates(const std::string& kind, int num_threads, int repetitions,
                                 double min_s);

// The kinds that this CPU runs: "float32", and "int8" where it has an instruction for bytes.
std::vector<std::string> multiply_kinds();

// The kernel variant that multiplies so on this CPU ("avxvnni", ...); "" where there is none.
std::string multiply_isa(const std::string& kind);

}  // namespace ridgeline
