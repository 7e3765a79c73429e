// Python bindings of probe/.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "probe/probe.h"
#include "simd/dispatch.h"

namespace nb = nanobind;

namespace ridgeline {
namespace {

using Pairs = std::vector<std::pair<double, double>>;

constexpr int kMaxThreads = 4096, kMaxRepetitions = 10000;

void check(int num_threads, int repetitions, double min_s) {
  require(num_threads > 0 && num_threads <= kMaxThreads, "num_threads must be in 1..4096");
  require(repetitions > 0 && repetitions <= kMaxRepetitions, "repetitions must be in 1..10000");
  require(std::isfinite(min_s) && min_s > 0 && min_s <= 60, "min_s must be in (0, 60]");
}

Pairs pairs(const std::vector<Rate>& rates) {
  Pairs out;
  for (const Rate& rate : rates) out.emplace_back(rate.per_s, rate.cpu_share);
  return out;
}

Pairs read(size_t total_bytes, int num_threads, int repetitions, double min_s) {
  check(num_threads, repetitions, min_s);
  require(total_bytes <= (size_t{1} << 40), "total_bytes must be at most 2**40");
  nb::gil_scoped_release release;
  return pairs(read_rates(total_bytes, num_threads, repetitions, min_s));
}

Pairs multiply(const std::string& kind, int num_threads, int repetitions, double min_s) {
  check(num_threads, repetitions, min_s);
  nb::gil_scoped_release release;
  return pairs(multiply_rates(kind, num_threads, repetitions, min_s));
}

}  // namespace

void bind_probe(nb::module_& m) {
  m.def("read_rates", &read, nb::arg("total_bytes"), nb::arg("num_threads"), nb::arg("repetitions"),
        nb::arg("min_s"),
        "Streaming reads: one (bytes per second, CPU share) per repetition, all threads together.");
  m.def("multiply_rates", &multiply, nb::arg("kind"), nb::arg("num_threads"),
        nb::arg("repetitions"), nb::arg("min_s"),
        "Multiply-adds in registers: one (operations per second, CPU share) per repetition.");
  m.def("multiply_kinds", &multiply_kinds,
        "The kinds that multiply_rates can measure on this CPU.");
  m.def("multiply_isa", &multiply_isa, nb::arg("kind"),
        "The variant of the kernels whose multiply-add multiply_rates measures; \"\" where there "
        "is none.");
}

}  // namespace ridgeline
