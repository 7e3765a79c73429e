#define USE_VNNI
#define USE_BFLOAT16
#define ATTENTION_OPS attention_ops_avx512pairs
#define ISA_NAME "avx512pairs"
#include "attention_avx512.inc"
