#define USE_VNNI
#define USE_TILES
#define LINEAR_OPS linear_ops_avx512amx
#define ISA_NAME "avx512amx"
#include "linear_avx512.inc"
