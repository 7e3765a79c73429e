#define USE_VNNI
#define ATTENTION_OPS attention_ops_avxvnni
#define ISA_NAME "avxvnni"
#include "attention_avx2.inc"
