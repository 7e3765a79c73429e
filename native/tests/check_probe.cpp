// Do the loops that measure a CPU's peak do what they say? Each counts its multiply-adds; every sum grows by the
// same amount with each of them, so the sums tell how many there were. Built with SIMDe for every instruction
// (`make check-isa`), because a CPU that lacks them could only be asked about the loops that it has.
#include <stdio.h>

#include <cstdint>
#include <string>

#include "../multiply_loops.inc"

using namespace ridgeline;

int main() {
  int failures = 0, loops = 0;
  const auto all = [](const std::string&) { return true; };
  for (const char* kind : {"float32", "bf16", "bf16_kv", "int4", "int16", "int8"})
    each_multiply_loop(kind, all, [&](const char* isa, double (*loop)(uint64_t, double*), bool) {
      double total = 0;
      const uint64_t turns = 5;
      const double said = loop(turns, &total);
      const double each = std::string(kind) == "float32" || std::string(kind).find("bf16") == 0 ? 0.5 : 1.0;  // what one multiply-add adds
      ++loops;
      if (said != 2 * total / each) {
        ++failures;
        printf("FAIL %s %s: says %.0f operations, did %.0f\n", kind, isa, said, 2 * total / each);
      }
    });
  printf("probe: %d loops, %d failures\n", loops, failures);
  return failures != 0;
}
