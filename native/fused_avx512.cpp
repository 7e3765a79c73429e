#define LANES 16
#define ROW_OPS row_ops_avx512
#define ISA_NAME "avx512"
#include "fused_kernel.inc"
