#include "quantize/scale_search_kernel.h"

namespace ridgeline {

void search_scales_portable(const ScaleSearchArgs& args) { ScaleSearch<4, 2>::search(args); }

}  // namespace ridgeline
