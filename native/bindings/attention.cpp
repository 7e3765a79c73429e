// Python bindings of attention/. Everything that is constant for a step is checked once, in AttentionPlan.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "attention/paged_kv.h"
#include "attention/variants.h"

namespace nb = nanobind;

namespace ridgeline {
namespace {

KvKind kind_from(const std::string& name) {
  if (name == "float32") return KvKind::kFloat32;
  if (name == "bfloat16") return KvKind::kBfloat16;
  if (name == "float16") return KvKind::kFloat16;
  if (name == "int8") return KvKind::kInt8;
  if (name == "fp8") return KvKind::kFp8;
  throw std::invalid_argument("unknown KV format " + name +
                              "; known: float32, bfloat16, float16, int8, fp8");
}

PagedKv make_paged_kv(uintptr_t k, uintptr_t v, const std::string& kind, int num_blocks,
                      int block_size, int num_kv_heads, int head_dim, int64_t stride_block,
                      int64_t stride_head, int64_t num_bytes) {
  const PagedKv kv = {reinterpret_cast<char*>(k),
                      reinterpret_cast<char*>(v),
                      kind_from(kind),
                      num_blocks,
                      block_size,
                      num_kv_heads,
                      head_dim,
                      stride_block,
                      stride_head};
  kv.check(num_bytes);
  return kv;
}

using Runs = nb::typed<nb::list, nb::typed<nb::tuple, nb::any, nb::ellipsis>>;

// Each run is (first position, number of rows, block table[, index of the table's first block]).
AttentionPlan make_plan(Runs runs, int num_blocks, int block_size) {
  require(num_blocks > 0 && block_size > 0, "the KV cache has no blocks");
  AttentionPlan plan;
  plan.num_blocks = num_blocks;
  plan.block_size = block_size;
  for (nb::handle item : runs) {
    const nb::tuple run = nb::cast<nb::tuple>(item);
    for (nb::handle block : nb::cast<nb::tuple>(run[2]))
      plan.table.push_back(nb::cast<int32_t>(block));
    const int first_place = run.size() > 3 ? nb::cast<int>(run[3]) : 0;
    plan.add_run(nb::cast<int>(run[0]), nb::cast<int>(run[1]), first_place);
  }
  return plan;
}

// The arguments of a step without its results.
AttentionArgs step_args(const AttentionPlan& plan, const PagedKv& kv, const AttentionParams& params,
                        uintptr_t q, int64_t q_stride_row, int64_t q_stride_head, int num_threads) {
  params.check(kv);
  plan.check(kv);
  AttentionArgs a = attention_args(plan, kv, params);
  a.q = reinterpret_cast<const float*>(q);
  a.q_stride_row = q_stride_row;
  a.q_stride_head = q_stride_head;
  a.num_threads = num_threads;
  return a;
}

void attend(const AttentionPlan& plan, const PagedKv& kv, uintptr_t q, int64_t q_stride_row,
            int64_t q_stride_head, int num_heads, uintptr_t out, float scale, int window,
            float softcap, int num_threads, const std::string& isa, uintptr_t sinks) {
  require(q && out && num_threads > 0, "q and out need memory, and there must be threads");
  const AttentionParams params = {num_heads, scale, window, softcap,
                                  reinterpret_cast<const float*>(sinks)};
  AttentionArgs a = step_args(plan, kv, params, q, q_stride_row, q_stride_head, num_threads);
  a.out = reinterpret_cast<float*>(out);
  const AttentionOps& ops = attention_ops(isa);
  nb::gil_scoped_release release;
  ops.attend(a);
}

// The blocks of each run's groups in INT4, the first group first.
Int4Tables make_tables(nb::typed<nb::list, nb::typed<nb::tuple, int, nb::ellipsis>> runs,
                       int num_blocks) {
  Int4Tables tables;
  tables.num_blocks = num_blocks;
  for (nb::handle run : runs) {
    std::vector<int32_t> blocks;
    for (nb::handle block : nb::cast<nb::tuple>(run)) blocks.push_back(nb::cast<int32_t>(block));
    tables.add_run(blocks);
  }
  return tables;
}

void attend_int4(const AttentionPlan& plan, const PagedKv& recent, const Int4Tables& tables,
                 const Int4Kv& kv, uintptr_t q, int64_t q_stride_row, int64_t q_stride_head,
                 int num_heads, uintptr_t out, float scale, int window, float softcap,
                 int num_threads, const std::string& isa, uintptr_t sinks) {
  require(q && out && num_threads > 0, "q and out need memory, and there must be threads");
  const AttentionParams params = {num_heads, scale, window, softcap,
                                  reinterpret_cast<const float*>(sinks)};
  AttentionArgs a = step_args(plan, recent, params, q, q_stride_row, q_stride_head, num_threads);
  a.out = reinterpret_cast<float*>(out);
  tables.check(plan, recent, kv);
  const AttentionOps& ops = attention_ops(isa);
  nb::gil_scoped_release release;
  ops.attend_int4(a, tables.groups(kv));
}

// Partials of every row over the chunks of one rank, [num_partials, H, partial_width].
void attend_partials(const AttentionPlan& plan, const ContextPlan& context, int rank,
                     const PagedKv& kv, uintptr_t q, int64_t q_stride_row, int64_t q_stride_head,
                     int num_heads, uintptr_t partials, float scale, float softcap, int num_threads,
                     const std::string& isa) {
  require(q && partials && num_threads > 0, "q and partials need memory, and there must be threads");
  const AttentionParams params = {num_heads, scale, context.window, softcap};
  AttentionArgs a = step_args(plan, kv, params, q, q_stride_row, q_stride_head, num_threads);
  const AttentionOps& ops = attention_ops(isa);
  const ContextPart part = context.part(rank, partials);
  nb::gil_scoped_release release;
  ops.attend_partials(a, part);
}

// Rows first_row .. end_row - 1 of `out` [T, H, D] from the partials of all ranks.
void merge_partials(const AttentionPlan& plan, const ContextPlan& context, const PagedKv& kv,
                    const std::vector<uintptr_t>& partials, int num_heads, uintptr_t out,
                    int first_row, int end_row, int num_threads, const std::string& isa,
                    uintptr_t sinks) {
  require(out && num_threads > 0, "out needs memory, and there must be threads");
  require(first_row >= 0 && first_row <= end_row && end_row <= plan.num_rows(),
          "rows outside the step");
  require(static_cast<int>(partials.size()) == context.num_ranks, "partials of every rank");
  const AttentionParams params = {num_heads, 1.0f, context.window, 0.0f,
                                  reinterpret_cast<const float*>(sinks)};
  params.check(kv);
  plan.check(kv);
  AttentionArgs a = attention_args(plan, kv, params);
  a.out = reinterpret_cast<float*>(out);
  a.num_threads = num_threads;
  std::vector<ContextPart> parts;
  for (int rank = 0; rank < context.num_ranks; ++rank)
    parts.push_back(context.part(rank, partials[rank]));
  const AttentionOps& ops = attention_ops(isa);
  nb::gil_scoped_release release;
  ops.merge_partials(a, parts.data(), first_row, end_row);
}

// Stores the step's new keys and values [T, 2, G, D] (rows contiguous in D) in the cache.
void write_kv(const AttentionPlan& plan, const PagedKv& kv, uintptr_t new_kv, int64_t stride_row,
              int64_t stride_kind, int64_t stride_head, const std::string& isa) {
  require(new_kv != 0, "new_kv needs memory");
  plan.check(kv);
  const float* from = reinterpret_cast<const float*>(new_kv);
  const AttentionOps& ops = attention_ops(isa);
  std::vector<char*> blocks(plan.num_rows());
  nb::gil_scoped_release release;
  for (KvSide side : {KvSide::kKeys, KvSide::kValues})
    for (int g = 0; g < kv.num_kv_heads; ++g) {
      char* first = (side == KvSide::kKeys ? kv.k : kv.v) + g * kv.stride_head;
      for (int row = 0; row < plan.num_rows(); ++row)
        blocks[row] = first + plan.block_offset(kv, row);
      ops.store_rows({from + (side == KvSide::kValues ? stride_kind : 0) + g * stride_head,
                      stride_row, blocks.data(), plan.within_block.data(), plan.num_rows(),
                      kv.head_dim, kv.block_size, kv.kind, side});
    }
}

void bind_int4(nb::module_& m) {
  nb::class_<Int4Kv>(m, "Int4Kv",
                     "Where one layer's groups in INT4 are, checked against its memory.")
      .def(
          "__init__",
          [](Int4Kv* self, uintptr_t k, uintptr_t v, int num_blocks, int num_kv_heads, int head_dim,
             int64_t stride_block, int64_t stride_head, int64_t num_bytes) {
            const Int4Kv kv = {reinterpret_cast<const char*>(k),
                               reinterpret_cast<const char*>(v),
                               num_blocks,
                               num_kv_heads,
                               head_dim,
                               stride_block,
                               stride_head};
            kv.check(num_bytes);
            new (self) Int4Kv(kv);
          },
          nb::arg("k"), nb::arg("v"), nb::arg("num_blocks"), nb::arg("num_kv_heads"),
          nb::arg("head_dim"), nb::arg("stride_block"), nb::arg("stride_head"),
          nb::arg("num_bytes"));
  nb::class_<Int4Tables>(
      m, "Int4Tables", "The blocks of each run's groups in INT4; block ids are checked here, once.")
      .def(
          "__init__",
          [](Int4Tables* self, nb::typed<nb::list, nb::typed<nb::tuple, int, nb::ellipsis>> runs,
             int num_blocks) { new (self) Int4Tables(make_tables(runs, num_blocks)); },
          nb::arg("runs"), nb::arg("num_blocks"));
  m.def("attend_int4", &attend_int4, nb::arg("plan"), nb::arg("recent"), nb::arg("tables"),
        nb::arg("kv"), nb::arg("q"), nb::arg("q_stride_row"), nb::arg("q_stride_head"),
        nb::arg("num_heads"), nb::arg("out"), nb::arg("scale"), nb::arg("window"),
        nb::arg("softcap"), nb::arg("num_threads"), nb::arg("isa"), nb::arg("sinks") = 0,
        "Attention of q [rows, heads, head dim] over groups in INT4 and recent rows in INT8, to "
        "out.");
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<PagedKv>(m, "PagedKv",
                      "Where one layer's keys and values are, checked against its memory.")
      .def(
          "__init__",
          [](PagedKv* self, uintptr_t k, uintptr_t v, const std::string& kind, int num_blocks,
             int block_size, int num_kv_heads, int head_dim, int64_t stride_block,
             int64_t stride_head, int64_t num_bytes) {
            new (self) PagedKv(make_paged_kv(k, v, kind, num_blocks, block_size, num_kv_heads,
                                             head_dim, stride_block, stride_head, num_bytes));
          },
          nb::arg("k"), nb::arg("v"), nb::arg("kind"), nb::arg("num_blocks"), nb::arg("block_size"),
          nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("stride_block"),
          nb::arg("stride_head"), nb::arg("num_bytes"));
  nb::class_<AttentionPlan>(
      m, "AttentionPlan",
      "The runs of one step: (first position, number of rows, block table) and, if it is not 0, the "
      "index of the table's first block. Block ids are checked here, once.")
      .def(
          "__init__",
          [](AttentionPlan* self, Runs runs, int num_blocks, int block_size) {
            new (self) AttentionPlan(make_plan(runs, num_blocks, block_size));
          },
          nb::arg("runs"), nb::arg("num_blocks"), nb::arg("block_size"))
      .def_prop_ro("num_rows", &AttentionPlan::num_rows);
  nb::class_<ContextPlan>(
      m, "ContextPlan",
      "Where the partials of a step's rows are if the chunks of keys are on several ranks.")
      .def(nb::init<const AttentionPlan&, int, int>(), nb::arg("plan"), nb::arg("window"),
           nb::arg("num_ranks"))
      .def(
          "num_partials",
          [](const ContextPlan& self, int rank) {
            self.part(rank, 0);
            return self.first_partial[static_cast<size_t>(rank)].back();
          },
          nb::arg("rank"), "The partials of all rows over a rank's chunks.");
  m.def(
      "partial_width",
      [](const PagedKv& kv, const std::string& isa) {
        AttentionArgs a{};
        a.kind = kv.kind;
        a.head_dim = kv.head_dim;
        return attention_ops(isa).num_slots(a) + 2;
      },
      nb::arg("kv"), nb::arg("isa"), "Floats of a partial of one head.");
  m.def("attend_partials", &attend_partials, nb::arg("plan"), nb::arg("context"), nb::arg("rank"),
        nb::arg("kv"), nb::arg("q"), nb::arg("q_stride_row"), nb::arg("q_stride_head"),
        nb::arg("num_heads"), nb::arg("partials"), nb::arg("scale"), nb::arg("softcap"),
        nb::arg("num_threads"), nb::arg("isa"),
        "Partials [partials, heads, partial_width] of q over the chunks that a rank has.");
  m.def("merge_partials", &merge_partials, nb::arg("plan"), nb::arg("context"), nb::arg("kv"),
        nb::arg("partials"), nb::arg("num_heads"), nb::arg("out"), nb::arg("first_row"),
        nb::arg("end_row"), nb::arg("num_threads"), nb::arg("isa"), nb::arg("sinks") = 0,
        "Attention of some rows from the partials of all ranks, with the bits of `attend`.");
  m.def(
      "attention_rounds",
      [](const std::string& kind, const std::string& isa) {
        return kind_from(kind) == KvKind::kBfloat16 && attention_ops(isa).rounds_to_bf16;
      },
      nb::arg("kind"), nb::arg("isa"),
      "Whether queries and weights are rounded to the cache's format too.");
  m.def("write_kv", &write_kv, nb::arg("plan"), nb::arg("kv"), nb::arg("new_kv"),
        nb::arg("stride_row"), nb::arg("stride_kind"), nb::arg("stride_head"), nb::arg("isa"),
        "Stores new keys and values [rows, 2, kv heads, head dim] in the cache.");
  m.def("attend", &attend, nb::arg("plan"), nb::arg("kv"), nb::arg("q"), nb::arg("q_stride_row"),
        nb::arg("q_stride_head"), nb::arg("num_heads"), nb::arg("out"), nb::arg("scale"),
        nb::arg("window"), nb::arg("softcap"), nb::arg("num_threads"), nb::arg("isa"),
        nb::arg("sinks") = 0,
        "Attention of q [rows, heads, head dim] over the cache, to out.");
  bind_int4(m);
}

}  // namespace ridgeline
