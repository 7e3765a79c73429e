#include "quantize/scale_search_kernel.h"

namespace ridgeline {

void search_scales_avx2(const ScaleSearchArgs& args) { ScaleSearch<8, 2>::search(args); }

}  // namespace ridgeline
