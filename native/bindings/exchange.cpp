// Python bindings of exchange/.
#include <nanobind/nanobind.h>

#include <stdexcept>

#include "exchange/counters.h"
#include "simd/dispatch.h"

namespace nb = nanobind;

namespace ridgeline {
namespace {

void publish_counter(uintptr_t counter, uint32_t value) {
  require(counter && counter % 4 == 0, "a counter needs an aligned address");
  publish(reinterpret_cast<uint32_t*>(counter), value);
}

bool wait_for_counters(uintptr_t first, int count, int64_t stride, uint32_t value,
                       uintptr_t aborted, double timeout_s) {
  require(first && aborted && first % 4 == 0 && aborted % 4 == 0, "counters need memory");
  require(count >= 0 && stride >= 4 && stride % 4 == 0 && timeout_s >= 0, "counters out of range");
  nb::gil_scoped_release release;
  return wait_for(reinterpret_cast<const char*>(first), count, stride, value,
                  reinterpret_cast<const uint32_t*>(aborted),
                  static_cast<int64_t>(timeout_s * 1e9));
}

}  // namespace

void bind_exchange(nb::module_& m) {
  m.def("publish_counter", &publish_counter, nb::arg("counter"), nb::arg("value"),
        "Set a counter in shared memory and wake the processes that wait for it.");
  m.def("wait_for_counters", &wait_for_counters, nb::arg("first"), nb::arg("count"),
        nb::arg("stride"), nb::arg("value"), nb::arg("aborted"), nb::arg("timeout_s"),
        "Wait until counters have reached a value; False if `aborted` is set or the time is over.");
}

}  // namespace ridgeline
