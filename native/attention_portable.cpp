#define LANES 4
#define ATTEND attend_portable
#define STORE_ROWS store_rows_portable
#include "attention_kernel.inc"
