#define USE_VNNI
#define USE_BFLOAT16
#define USE_TILES
#define ATTENTION_OPS attention_ops_avx512amx
#define ISA_NAME "avx512amx"
#include "attention_avx512.inc"
