#define LANES 8
#define VECTORS 2
#define CHOOSE choose_ranges_avx2
#include "ranges_kernel.inc"
