#define LANES 16
#define ATTEND attend_avx512
#define STORE_ROWS store_rows_avx512
#include "attention_kernel.inc"
