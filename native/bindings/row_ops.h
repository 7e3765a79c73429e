// The RowOps of a variant by name.
#pragma once
#include <string>

#include "layer/row_ops.h"
#include "simd/dispatch.h"

namespace ridgeline {

inline const RowOps& row_ops(const std::string& name) {
  switch (isa_from(name)) {
#if defined(__x86_64__)
    case Isa::kAvx512: return row_ops_avx512();
    case Isa::kAvx2: return row_ops_avx2();
#endif
    default: return row_ops_portable();
  }
}

}  // namespace ridgeline
