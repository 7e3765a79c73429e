// Python face of the attention kernel: checks every shape, stride and block id before a pointer is used.
//
// Pointers come as integers (tensor.data_ptr()): importing a tensor through DLPack costs more than the
// kernel itself at decode sizes. What is constant for a step is checked once, in AttentionPlan.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_isa.h"
#include "isa.h"

namespace nb = nanobind;

namespace ridgeline {
namespace {

using Ints = std::vector<int32_t>;

KvKind kind_from(const std::string& name) {
  if (name == "float32") return KvKind::kFloat32;
  if (name == "bfloat16") return KvKind::kBfloat16;
  if (name == "float16") return KvKind::kFloat16;
  if (name == "int8") return KvKind::kInt8;
  throw std::invalid_argument("unknown KV format " + name + "; known: float32, bfloat16, float16, int8");
}

// Where one layer's K and V live, and how far its indices may reach. Strides and the end are in bytes.
struct PagedKv {
  char* k;
  char* v;
  KvKind kind;
  int num_blocks, block_size, num_kv_heads, head_dim;
  int64_t stride_block, stride_token, stride_head;

  PagedKv(uintptr_t k, uintptr_t v, const std::string& kind, int num_blocks, int block_size,
          int num_kv_heads, int head_dim, int64_t stride_block, int64_t stride_token, int64_t stride_head,
          int64_t num_bytes)
      : k(reinterpret_cast<char*>(k)), v(reinterpret_cast<char*>(v)), kind(kind_from(kind)),
        num_blocks(num_blocks), block_size(block_size), num_kv_heads(num_kv_heads), head_dim(head_dim),
        stride_block(stride_block), stride_token(stride_token), stride_head(stride_head) {
    require(k && v, "the KV cache has no memory");
    require(num_blocks > 0 && block_size > 0 && num_kv_heads > 0, "KV cache counts must be positive");
    require(head_dim > 0 && head_dim <= kMaxHeadDim, "head_dim must be in 1..256");
    require(stride_block > 0 && stride_token > 0 && stride_head > 0, "KV cache strides must be positive");
    const int64_t last = (num_blocks - 1) * stride_block + (block_size - 1) * stride_token +
                         (num_kv_heads - 1) * stride_head + row_bytes(this->kind, head_dim);
    require(last <= num_bytes, "KV cache strides reach past its memory");
  }

  int64_t at(int32_t block, int position) const {
    return block * stride_block + (position % block_size) * stride_token;
  }
};

// The runs of one step: which rows, which positions, which blocks.
struct AttentionPlan {
  Ints row_start, computed, table_start, table;
  int num_rows, block_size;

  AttentionPlan(Ints row_start_, Ints computed_, Ints table_start_, Ints table_, int num_blocks,
                int block_size)
      : row_start(std::move(row_start_)), computed(std::move(computed_)),
        table_start(std::move(table_start_)), table(std::move(table_)), block_size(block_size) {
    const size_t runs = computed.size();
    require(row_start.size() == runs + 1 && table_start.size() == runs + 1, "offsets need R + 1 entries");
    require(row_start[0] == 0 && table_start[0] == 0, "offsets start at 0");
    require(table_start[runs] == static_cast<int32_t>(table.size()), "table offsets must end at its size");
    for (size_t r = 0; r < runs; ++r) {
      const int rows = row_start[r + 1] - row_start[r];
      const int64_t room = static_cast<int64_t>(table_start[r + 1] - table_start[r]) * block_size;
      require(rows >= 0 && computed[r] >= 0, "a run has a negative size or position");
      require(computed[r] + static_cast<int64_t>(rows) <= room, "a run's block table is too short");
    }
    for (int32_t b : table) require(b >= 0 && b < num_blocks, "a block id is outside the KV cache");
    num_rows = row_start[runs];
  }
};

void attend(const AttentionPlan& plan, const PagedKv& kv, uintptr_t q, int64_t q_stride_row,
            int64_t q_stride_head, int num_heads, uintptr_t out, float scale, int window, float softcap,
            int num_threads, const std::string& isa) {
  require(q && out, "q and out need memory");
  require(num_heads > 0 && num_heads % kv.num_kv_heads == 0, "num_heads must be a multiple of kv heads");
  require(plan.block_size == kv.block_size, "plan and cache disagree on the block size");
  require(window >= 0 && softcap >= 0 && num_threads > 0, "window, softcap or num_threads out of range");
  AttentionArgs a{};
  a.q = reinterpret_cast<const float*>(q);
  a.out = reinterpret_cast<float*>(out);
  a.k = kv.k;
  a.v = kv.v;
  a.kind = kv.kind;
  a.q_stride_row = q_stride_row;
  a.q_stride_head = q_stride_head;
  a.stride_block = kv.stride_block;
  a.stride_token = kv.stride_token;
  a.stride_head = kv.stride_head;
  a.row_start = plan.row_start.data();
  a.computed = plan.computed.data();
  a.table_start = plan.table_start.data();
  a.table = plan.table.data();
  a.num_runs = static_cast<int>(plan.computed.size());
  a.num_heads = num_heads;
  a.num_kv_heads = kv.num_kv_heads;
  a.head_dim = kv.head_dim;
  a.block_size = kv.block_size;
  a.scale = scale;
  a.window = window;
  a.softcap = softcap;
  a.num_threads = num_threads;
  const AttentionOps& ops = attention_ops(isa);
  nb::gil_scoped_release release;
  ops.attend(a);
}

// Store the step's new keys and values [T, 2, G, D] (rows contiguous in D) in their places in the cache.
void write_kv(const AttentionPlan& plan, const PagedKv& kv, uintptr_t new_kv, int64_t stride_row,
              int64_t stride_kind, int64_t stride_head, const std::string& isa) {
  require(new_kv != 0, "new_kv needs memory");
  require(plan.block_size == kv.block_size, "plan and cache disagree on the block size");
  const float* from = reinterpret_cast<const float*>(new_kv);
  const AttentionOps& ops = attention_ops(isa);
  std::vector<char*> to(plan.num_rows);
  nb::gil_scoped_release release;
  for (size_t r = 0; r < plan.computed.size(); ++r) {
    const int32_t* table = plan.table.data() + plan.table_start[r];
    for (int row = plan.row_start[r]; row < plan.row_start[r + 1]; ++row) {
      const int position = plan.computed[r] + row - plan.row_start[r];
      to[row] = kv.k + kv.at(table[position / kv.block_size], position);
    }
  }
  const int64_t to_values = kv.v - kv.k;
  for (int g = 0; g < kv.num_kv_heads; ++g) {
    ops.store_rows({from + g * stride_head, stride_row, to.data(), plan.num_rows, kv.head_dim, kv.kind});
    for (char*& row : to) row += to_values;
    ops.store_rows({from + stride_kind + g * stride_head, stride_row, to.data(), plan.num_rows, kv.head_dim,
                      kv.kind});
    for (char*& row : to) row += kv.stride_head - to_values;
  }
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<PagedKv>(m, "PagedKv")
      .def(nb::init<uintptr_t, uintptr_t, const std::string&, int, int, int, int, int64_t, int64_t, int64_t,
                    int64_t>(),
           nb::arg("k"), nb::arg("v"), nb::arg("kind"), nb::arg("num_blocks"), nb::arg("block_size"),
           nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("stride_block"),
           nb::arg("stride_token"), nb::arg("stride_head"), nb::arg("num_bytes"));
  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def(nb::init<Ints, Ints, Ints, Ints, int, int>(), nb::arg("row_start"), nb::arg("computed"),
           nb::arg("table_start"), nb::arg("table"), nb::arg("num_blocks"), nb::arg("block_size"))
      .def_ro("num_rows", &AttentionPlan::num_rows);
  m.def("write_kv", &write_kv, nb::arg("plan"), nb::arg("kv"), nb::arg("new_kv"),
        nb::arg("stride_row"), nb::arg("stride_kind"), nb::arg("stride_head"), nb::arg("isa"));
  m.def("attend", &attend, nb::arg("plan"), nb::arg("kv"), nb::arg("q"), nb::arg("q_stride_row"),
        nb::arg("q_stride_head"), nb::arg("num_heads"), nb::arg("out"), nb::arg("scale"),
        nb::arg("window"), nb::arg("softcap"), nb::arg("num_threads"), nb::arg("isa"));
}

}  // namespace ridgeline
