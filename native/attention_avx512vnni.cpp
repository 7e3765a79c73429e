#define USE_VNNI
#define ATTENTION_OPS attention_ops_avx512vnni
#define ISA_NAME "avx512vnni"
#include "attention_avx512.inc"
