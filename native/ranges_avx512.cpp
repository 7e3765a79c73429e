#define LANES 16
#define VECTORS 4
#define CHOOSE choose_ranges_avx512
#include "ranges_kernel.inc"
