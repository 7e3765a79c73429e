#define USE_VNNI
#define USE_PAIRS
#define LINEAR_OPS linear_ops_avx512vnni
#define ISA_NAME "avx512vnni"
#include "linear_avx512.inc"
