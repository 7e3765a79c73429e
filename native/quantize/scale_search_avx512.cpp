#include "quantize/scale_search_kernel.h"

namespace ridgeline {

void search_scales_avx512(const ScaleSearchArgs& args) { ScaleSearch<16, 4>::search(args); }

}  // namespace ridgeline
