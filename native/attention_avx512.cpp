#define LANES 16
#define ATTEND attend_avx512
#include "attention_kernel.inc"
