#define LANES 4
#define ATTEND attend_portable
#include "attention_kernel.inc"
