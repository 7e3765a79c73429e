#define LANES 4
#define ROW_OPS row_ops_portable
#define ISA_NAME "portable"
#include "fused_kernel.inc"
