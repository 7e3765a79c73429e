#define LINEAR_OPS linear_ops_avx2
#define ISA_NAME "avx2"
#include "linear_avx2.inc"
