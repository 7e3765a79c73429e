// Emulated kernels are those of AVX-512.
#pragma once
#include "simd/avx512.h"
