#define USE_VNNI
#define LINEAR_OPS linear_ops_avxvnni
#define ISA_NAME "avxvnni"
#include "linear_avx2.inc"
