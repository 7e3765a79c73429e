#define LANES 8
#define ATTEND attend_avx2
#define STORE_ROWS store_rows_avx2
#include "attention_kernel.inc"
