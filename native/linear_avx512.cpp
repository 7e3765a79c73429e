#define LINEAR_OPS linear_ops_avx512
#define ISA_NAME "avx512"
#include "linear_avx512.inc"
