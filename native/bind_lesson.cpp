// Python face of the lesson; see lesson.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>
#include <vector>

#include "isa.h"
#include "lesson.h"

namespace nb = nanobind;

namespace ridgeline {
namespace {

Lesson level_of(const std::string& name) {
  constexpr const char* kNames[] = {"plain", "vectorised", "parallel", "tiled", "fused"};
  for (int i = 0; i < 5; ++i)
    if (name == kNames[i]) return static_cast<Lesson>(i);
  throw std::invalid_argument("unknown level " + name + "; known: plain, vectorised, parallel, tiled, fused");
}

void lesson(const std::string& level, uintptr_t x, uintptr_t g, uintptr_t u, uintptr_t h, int num_rows, int num_in,
            int num_out, int num_threads, const std::string& isa) {
  require(x && g && u && h, "x, g, u and h need memory");
  require(num_rows > 0 && num_in > 0 && num_out > 0 && num_threads > 0, "sizes must be positive");
  const Lesson asked = level_of(level);
  const Isa chosen = isa_from(isa);
  nb::gil_scoped_release release;
  std::vector<float> between(asked == Lesson::kFused ? 0 : static_cast<size_t>(2) * num_rows * num_out);
  const LessonArgs args = {reinterpret_cast<const float*>(x), reinterpret_cast<const float*>(g),
                           reinterpret_cast<const float*>(u), reinterpret_cast<float*>(h), between.data(),
                           between.data() + between.size() / 2, num_rows, num_in, num_out, num_threads};
#if defined(__x86_64__)
  if (chosen == Isa::kAvx512) return lesson_avx512(asked, args);
  if (chosen == Isa::kAvx2) return lesson_avx2(asked, args);
#endif
  lesson_portable(asked, args);
}

}  // namespace

void bind_lesson(nb::module_& m) {
  m.def("lesson", &lesson, nb::arg("level"), nb::arg("x"), nb::arg("g"), nb::arg("u"), nb::arg("h"),
        nb::arg("num_rows"), nb::arg("num_in"), nb::arg("num_out"), nb::arg("num_threads"), nb::arg("isa"));
}

}  // namespace ridgeline
