#define LANES 4
#define LESSON lesson_portable
#include "lesson_kernel.inc"
