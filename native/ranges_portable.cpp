#define LANES 4
#define VECTORS 2
#define CHOOSE choose_ranges_portable
#include "ranges_kernel.inc"
