#define ATTENTION_OPS attention_ops_avx2
#define ISA_NAME "avx2"
#include "attention_avx2.inc"
