#define LANES 8
#define ROW_OPS row_ops_avx2
#define ISA_NAME "avx2"
#include "fused_kernel.inc"
