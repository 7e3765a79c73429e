#define LANES 16
#define LESSON lesson_avx512
#include "lesson_kernel.inc"
