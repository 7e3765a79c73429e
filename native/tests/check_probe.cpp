// Whether the loops that measure a CPU's peak do as much as they say. Each counts its
// multiply-adds, and every one adds the same amount to a sum, so the sums tell how many there were.
// Built with SIMDe (`make check-isa`), because a CPU could only run the loops for which it has the
// instructions.
#include <stdio.h>

#include <cstdint>
#include <string>

#include "probe/multiply_loops.h"

using namespace ridgeline;

int main() {
  int failures = 0, loops = 0;
  const auto all = [](const std::string&) { return true; };
  for (const char* kind : {"float32", "bf16", "bf16_kv", "int4", "int16", "int8"})
    each_multiply_loop(kind, all, [&](const char* isa, double (*loop)(uint64_t, double*), bool) {
      double total = 0;
      const uint64_t iterations = 5;
      const double said = loop(iterations, &total);
      const double each = std::string(kind) == "float32" || std::string(kind).find("bf16") == 0
                              ? 0.5
                              : 1.0;  // per multiply-add
      ++loops;
      if (said != 2 * total / each) {
        ++failures;
        printf("FAIL %s %s: says %.0f operations, did %.0f\n", kind, isa, said, 2 * total / each);
      }
    });
  printf("probe: %d loops, %d failures\n", loops, failures);
  return failures != 0;
}
