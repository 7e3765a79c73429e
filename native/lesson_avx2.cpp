#define LANES 8
#define LESSON lesson_avx2
#include "lesson_kernel.inc"
