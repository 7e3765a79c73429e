#define ATTENTION_OPS attention_ops_avx512
#define ISA_NAME "avx512"
#include "attention_avx512.inc"
