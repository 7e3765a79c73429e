// Segments: the threads that run their operators, and the memory they work in.
#include "layer/segment.h"

#include <omp.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ridgeline {

void FreeDeleter::operator()(void* p) const { std::free(p); }

void* GrowingBuffer::reserve(int64_t bytes) {
  if (bytes > bytes_) {
    memory_.reset();
    bytes_ = 0;
    memory_.reset(std::aligned_alloc(64, static_cast<size_t>(round_up(bytes, 64))));
    if (!memory_) throw std::bad_alloc();
    bytes_ = bytes;
  }
  return memory_.get();
}

void Frame::reserve(Slot slot, int width) {
  slots[slot] = static_cast<float*>(own[slot].reserve(int64_t{4} * num_rows * width));
}

int64_t Frame::bytes() const {
  int64_t sum = scratch.bytes() + partials.bytes();
  for (const GrowingBuffer& buffer : own) sum += buffer.bytes();
  sum += 4 * static_cast<int64_t>(3 * experts.expert.size() + experts.weight.size());
  for (const PreparedBuffers* rows : {&prepared, &gated})
    for (const GrowingBuffer* buffer :
         {&rows->values, &rows->scales, &rows->sums, &rows->pair_offsets, &rows->wide})
      sum += buffer->bytes();
  return sum;
}

namespace {

constexpr int64_t kMacsPerThread = 1 << 20;  // with less to do, a thread is not worth waking
constexpr int kSpins = 4096;                 // pauses of a waiting thread before it yields its core

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

}  // namespace

struct alignas(64) OpProgress {
  std::atomic<int64_t> items{-1};
  alignas(64) std::atomic<int64_t> done{0};
  double finished_s = 0.0;  // where profiling: written by the thread that did the last item

  // The number of the operator's items, as the first thread to arrive counted them: for one that
  // comes late, what they depend on (routed experts) may already be a later layer's.
  int64_t count(const Op& op, const Frame& frame) {
    int64_t known = items.load(std::memory_order_acquire);
    if (known >= 0) return known;
    const int64_t counted = op.num_items(frame);
    return items.compare_exchange_strong(known, counted, std::memory_order_acq_rel) ? counted
                                                                                    : known;
  }

  void wait_for(int64_t num_items) const {
    for (int spin = 0; done.load(std::memory_order_acquire) < num_items; ++spin) {
      if (spin < kSpins)
        pause();
      else
        sched_yield();
    }
  }
};

// How many items of a thread's share of an operator have been claimed, by it or by other threads.
struct alignas(64) ClaimedItems {
  std::atomic<int64_t> count{0};
};

struct StepProgress {
  StepProgress(size_t num_ops, int num_threads)
      : threads(num_threads), ops(num_ops), claimed(num_ops * num_threads) {}
  int threads;
  std::vector<OpProgress> ops;
  std::vector<ClaimedItems> claimed;  // [operator][thread]
};

void Segment::add(std::unique_ptr<Op> op) {
  macs_ += op->macs();
  ops_.push_back(std::move(op));
}

void Segment::mark(const std::string& name) { names_.resize(ops_.size(), name); }

int Segment::threads_for(const Frame& frame) const {
  int64_t macs = macs_ * frame.num_rows;
  for (const auto& op : ops_) macs += op->step_macs();
  const int64_t worthwhile = macs / std::max(1, num_layers_) / kMacsPerThread + 1;
  return static_cast<int>(std::min<int64_t>(worthwhile, frame.num_threads));
}

// Of every operator, a thread takes the items of its own share first, in order, so that the memory
// it prefetches behind one item is what it needs for the next; then what is left of the others'
// shares.
void Segment::work(const Frame& frame, StepProgress& step, int thread, float* scratch,
                   double* arrived_s) const {
  if (frame.profiling) *arrived_s = now_s();
  for (size_t i = 0; i < ops_.size(); ++i) {
    OpProgress& progress = step.ops[i];
    const int64_t items = progress.count(*ops_[i], frame);
    int64_t num_done = 0;
    for (int other = 0; other < step.threads; ++other) {
      const int owner = (thread + other) % step.threads;
      const int64_t begin = items * owner / step.threads;
      const int64_t end = items * (owner + 1) / step.threads;
      std::atomic<int64_t>& claimed = step.claimed[i * step.threads + owner].count;
      for (int64_t item; (item = begin + claimed.fetch_add(1, std::memory_order_relaxed)) < end;
           ++num_done)
        ops_[i]->run(frame, item, scratch);
    }
    const bool did_last =
        num_done &&
        progress.done.fetch_add(num_done, std::memory_order_acq_rel) + num_done == items;
    if (did_last && frame.profiling) progress.finished_s = now_s();
    progress.wait_for(items);
  }
}

// Each operator's time counts from the end of the one before it, by the clock of the thread that
// ended it, since no thread need be there from the start.
void Segment::record_times(Frame& frame, const StepProgress& step, double since_s) const {
  for (size_t i = 0; i < ops_.size(); ++i) {
    const double end_s = std::max(since_s, step.ops[i].finished_s);
    frame.seconds[i < names_.size() ? names_[i] : ""] += end_s - since_s;
    since_s = end_s;
  }
}

void Segment::run(Frame& frame) const {
  int64_t floats = 0;
  for (const auto& op : ops_) floats = std::max<int64_t>(floats, op->scratch_floats());
  floats = round_up(floats, 16);
  for (const auto& op : ops_) op->begin(frame);
  const int threads = threads_for(frame);
  frame.scratch.reserve(4 * floats * threads);
  StepProgress step(ops_.size(), threads);
  std::vector<double> arrived_s(threads, std::numeric_limits<double>::infinity());
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int thread = omp_get_thread_num();
    work(frame, step, thread, frame.scratch.as<float>() + floats * thread, &arrived_s[thread]);
  }
  if (frame.profiling)
    record_times(frame, step, *std::min_element(arrived_s.begin(), arrived_s.end()));
}

}  // namespace ridgeline
