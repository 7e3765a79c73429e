// The widest vectors that this translation unit may use, chosen from the compiler's target flags.
//
// Each kernel file is compiled once per instruction set (see CMakeLists.txt); its headers include
// this one and use `Vf` and `Vi`, vectors of `kLanes` floats and int32, with the functions below.
// All three headers offer the same functions, so a kernel is written once.
//
// Everything that is compiled for an instruction set lives in an unnamed namespace, and uses no
// function templates of the standard library: the linker would merge copies of one function, and
// could keep the copy compiled for AVX-512 for code that runs on any CPU.
#pragma once

#if defined(__AVX512F__)
#include "simd/avx512.h"  // IWYU pragma: export
#elif defined(__AVX2__)
#include "simd/avx2.h"  // IWYU pragma: export
#else
#include "simd/portable.h"  // IWYU pragma: export
#endif
