// Machine probes. Functions on wide vectors have target attributes and are called only after asking
// the CPU, so this file needs no special flags and never executes an illegal instruction.
#include "probe/probe.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "simd/dispatch.h"
#include "simd/prefetch.h"

#if defined(__x86_64__)
#include "probe/multiply_loops.h"
#endif

namespace ridgeline {
namespace {

constexpr size_t kStride = 512;  // bytes per iteration: eight cache lines
// Lines are prefetched into L2 this far ahead, as the kernels prefetch weights: the CPU's own
// prefetcher stops at the end of a page. Weights are in large pages where the system supports them; so
// is the memory read here.
constexpr size_t kPrefetchBytes = 96 * 64;
constexpr size_t kLargePage = 2 << 20;

// Bytes of a thread's share that no cache of its own holds: from here on prefetching pays.
constexpr size_t kCacheBytes = 8 << 20;

// Whether lines are prefetched: those of an iteration in a burst, or each as it is read, some
// cycles after the one before (`delay`).
enum class Prefetch { kNone, kBurst, kPaced };

template <Prefetch kMode>
struct Prefetcher {
  int64_t zero_offset = 0;

  inline __attribute__((always_inline)) void iteration(const void* begin) const {
    if (kMode != Prefetch::kBurst) return;
    const char* at = static_cast<const char*>(begin) + kPrefetchBytes;
    for (size_t line = 0; line < kStride; line += 64) __builtin_prefetch(at + line, 0, 2);
  }
  inline __attribute__((always_inline)) void line(const void* begin) {
    if (kMode != Prefetch::kPaced) return;
    zero_offset = delay<3>(zero_offset);
    __builtin_prefetch(static_cast<const char*>(begin) + kPrefetchBytes + zero_offset, 0, 2);
  }
};

using Reader = uint64_t (*)(const uint8_t*, size_t);
using Multiplier = double (*)(uint64_t, double*);  // iterations -> operations done

template <Prefetch kMode>
uint64_t read_portable(const uint8_t* data, size_t bytes) {
  const uint64_t* p = reinterpret_cast<const uint64_t*>(data);
  uint64_t acc[8] = {};
  Prefetcher<kMode> prefetcher;
  for (size_t i = 0; i < bytes / 8; i += kStride / 8) {
    prefetcher.iteration(p + i);
    for (size_t line = i; line < i + kStride / 8; line += 8) {
      prefetcher.line(p + line);
      for (int j = 0; j < 8; ++j) acc[j] ^= p[line + j];
    }
  }
  return acc[0] ^ acc[1] ^ acc[2] ^ acc[3] ^ acc[4] ^ acc[5] ^ acc[6] ^ acc[7];
}

// 64 accumulators, which the compiler may keep in whatever vectors there are.
double multiply_portable(uint64_t iterations, double*) {
  float acc[64];
  for (int j = 0; j < 64; ++j) acc[j] = 1.0f + j;
  volatile float factor = 0.999f, term = 0.001f;
  const float f = factor, t = term;
  for (uint64_t i = 0; i < iterations; ++i)
    for (int j = 0; j < 64; ++j) acc[j] = acc[j] * f + t;
  volatile float sink = 0;
  for (int j = 0; j < 64; ++j) sink = sink + acc[j];
  return 2.0 * 64 * iterations;
}

#if defined(__x86_64__)
template <Prefetch kMode>
__attribute__((target("avx2"))) uint64_t read_avx2(const uint8_t* data, size_t bytes) {
  const __m256i* p = reinterpret_cast<const __m256i*>(data);
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  Prefetcher<kMode> prefetcher;
  for (size_t i = 0; i < bytes / 32; i += 16) {
    prefetcher.iteration(p + i);
    for (int j = 0; j < 16; j += 4) {
      prefetcher.line(p + i + j);
      a = _mm256_xor_si256(a, _mm256_load_si256(p + i + j));
      b = _mm256_xor_si256(b, _mm256_load_si256(p + i + j + 1));
      prefetcher.line(p + i + j + 2);
      c = _mm256_xor_si256(c, _mm256_load_si256(p + i + j + 2));
      d = _mm256_xor_si256(d, _mm256_load_si256(p + i + j + 3));
    }
  }
  a = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
  return _mm256_extract_epi64(a, 0) ^ _mm256_extract_epi64(a, 1) ^ _mm256_extract_epi64(a, 2) ^
         _mm256_extract_epi64(a, 3);
}

template <Prefetch kMode>
__attribute__((target("avx512f"))) uint64_t read_avx512(const uint8_t* data, size_t bytes) {
  const __m512i* p = reinterpret_cast<const __m512i*>(data);
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  Prefetcher<kMode> prefetcher;
  for (size_t i = 0; i < bytes / 64; i += 8) {
    prefetcher.iteration(p + i);
    for (int j = 0; j < 8; j += 4) {
      for (int line = j; line < j + 4; ++line) prefetcher.line(p + i + line);
      a = _mm512_xor_si512(a, _mm512_load_si512(p + i + j));
      b = _mm512_xor_si512(b, _mm512_load_si512(p + i + j + 1));
      c = _mm512_xor_si512(c, _mm512_load_si512(p + i + j + 2));
      d = _mm512_xor_si512(d, _mm512_load_si512(p + i + j + 3));
    }
  }
  alignas(64) uint64_t lanes[8];
  _mm512_store_si512(lanes, _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d)));
  uint64_t out = 0;
  for (uint64_t lane : lanes) out ^= lane;
  return out;
}

bool runs_here(const std::string& variant) {
  const bool avx512 = best_isa() == Isa::kAvx512, avx2 = best_isa() != Isa::kPortable;
  if (variant == "avx512amx") return avx512 && __builtin_cpu_supports("avx512vnni") && has_amx();
  if (variant == "avx512bf16")
    return avx512 && __builtin_cpu_supports("avx512vnni") && has_fast_bf16_dot();
  if (variant == "avx512pairs") return avx512 && has_fast_byte_adds();
  if (variant == "avx512vnni") return avx512 && __builtin_cpu_supports("avx512vnni");
  if (variant == "avxvnni") return avx2 && __builtin_cpu_supports("avxvnni");
  return variant == "avx512" ? avx512 : avx2;
}
#endif

// Whether prefetches in a burst are dropped: measured only on Xeons with AMX.
bool drops_prefetch_bursts() {
#if defined(__x86_64__)
  return runs_here("avx512amx");
#else
  return false;
#endif
}

template <Prefetch kMode>
Reader best_reader() {
#if defined(__x86_64__)
  if (best_isa() == Isa::kAvx512) return read_avx512<kMode>;
  if (best_isa() == Isa::kAvx2) return read_avx2<kMode>;
#endif
  return read_portable<kMode>;
}

struct MultiplyLoop {
  const char* isa;
  Multiplier run;  // null where this CPU has no instruction for the kind
};

// The first loop of the kind that this CPU runs: what the linear kernels multiply with
// (linear/variants.h).
MultiplyLoop best_multiplier(const std::string& kind) {
  MultiplyLoop best{"", nullptr};
#if defined(__x86_64__)
  each_multiply_loop(kind, runs_here, [&](const char* isa, Multiplier loop, bool runs) {
    if (!best.run && runs) best = {isa, loop};
  });
#endif
  if (!best.run && (kind == "float32" || kind == "bf16" || kind == "bf16_kv"))
    best = {"portable", multiply_portable};
  return best;
}

// Threads wait here, asleep, before and after each repetition: a sleeping thread is woken on an
// idle core, while one that spins and yields stays on the core of the thread it waits for, so that
// the two would run one after the other.
class Barrier {
 public:
  explicit Barrier(int num) : num_(num) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int generation = generation_;
    if (++waiting_ == num_) {
      waiting_ = 0;
      ++generation_;
      all_.notify_all();
    } else {
      all_.wait(lock, [&] { return generation_ != generation; });
    }
  }

 private:
  const int num_;
  std::mutex mutex_;
  std::condition_variable all_;
  int waiting_ = 0, generation_ = 0;
};

double wall_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double thread_cpu_s() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

struct Span {
  double begin_s, end_s, cpu_s, amount;
};

// What one thread does: prepare() once, then work(iterations) -> bytes or operations.
struct Worker {
  std::function<void()> prepare;
  std::function<double(uint64_t)> work;
};

Span timed(Worker& worker, uint64_t iterations) {
  const double cpu = thread_cpu_s(), begin = wall_s();
  const double amount = worker.work(iterations);
  const double end = wall_s();
  return {begin, end, thread_cpu_s() - cpu, amount};
}

// Measured from the first thread's start to the last one's end: threads that ran one after another
// were not running all that time, which shows in cpu_share.
Rate rate_of(const std::vector<Span>& spans) {
  double begin = spans[0].begin_s, end = spans[0].end_s, amount = 0, cpu = 0;
  for (const Span& s : spans) {
    begin = std::min(begin, s.begin_s);
    end = std::max(end, s.end_s);
    amount += s.amount;
    cpu += s.cpu_s;
  }
  const double wall = std::max(end - begin, 1e-9);
  return {amount / wall, std::min(cpu / (wall * spans.size()), 1.0)};
}

uint64_t iterations_for(Worker& worker, double min_s) {
  worker.work(1);  // warm
  uint64_t iterations = 1;
  double seconds = 0;
  while ((seconds = [&] {
           Span s = timed(worker, iterations);
           return s.end_s - s.begin_s;
         }()) < min_s / 8)
    iterations *= 4;
  return std::max<uint64_t>(1, static_cast<uint64_t>(iterations * min_s / seconds));
}

std::vector<Rate> run(std::vector<Worker>& workers, int repetitions, double min_s) {
  const int num = static_cast<int>(workers.size());
  Barrier barrier(num);
  std::atomic<uint64_t> iterations{1};
  std::vector<std::vector<Span>> spans(repetitions, std::vector<Span>(num));
  auto body = [&](int t) {
    workers[t].prepare();
    barrier.wait();
    if (t == 0) iterations = iterations_for(workers[0], min_s);
    barrier.wait();
    for (int r = 0; r < repetitions; ++r) {
      barrier.wait();
      spans[r][t] = timed(workers[t], iterations);
    }
  };
  // No thread works before all exist: if one cannot be created, the others end here. A thread that is
  // destroyed without having been joined would end the process.
  std::mutex creation;
  std::unique_lock<std::mutex> creating(creation);
  bool all_exist = false;
  std::vector<std::thread> threads;
  const auto join = [&] {
    for (std::thread& thread : threads) thread.join();
  };
  try {
    threads.reserve(num);
    for (int t = 1; t < num; ++t)
      threads.emplace_back([&, t] {
        { const std::lock_guard<std::mutex> created(creation); }
        if (all_exist) body(t);
      });
  } catch (const std::exception& error) {
    creating.unlock();
    join();
    throw std::runtime_error("cannot start " + std::to_string(num) + " threads: " + error.what());
  }
  all_exist = true;
  creating.unlock();
  body(0);
  join();
  std::vector<Rate> rates;
  for (const auto& repetition : spans) rates.push_back(rate_of(repetition));
  return rates;
}

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};

}  // namespace

std::vector<Rate> read_rates(size_t total_bytes, int num_threads, int repetitions, double min_s) {
  require(num_threads > 0 && repetitions > 0, "num_threads and repetitions must be positive");
  const size_t share = total_bytes / num_threads / kStride * kStride;
  require(share > 0, "the buffer is smaller than one stride per thread");
  const Reader reader = share <= kCacheBytes      ? best_reader<Prefetch::kNone>()
                        : drops_prefetch_bursts() ? best_reader<Prefetch::kPaced>()
                                                  : best_reader<Prefetch::kBurst>();
  std::vector<std::unique_ptr<uint8_t, Free>> buffers(num_threads);
  std::vector<uint64_t> sinks(num_threads);
  std::vector<Worker> workers(num_threads);
  for (int t = 0; t < num_threads; ++t) {
    const size_t pages = (share + kLargePage - 1) / kLargePage * kLargePage;
    buffers[t].reset(static_cast<uint8_t*>(std::aligned_alloc(kLargePage, pages)));
    if (!buffers[t]) throw std::bad_alloc();
    uint8_t* data = buffers[t].get();
#if defined(__linux__)
    madvise(data, pages, MADV_HUGEPAGE);
#endif
    uint64_t* sink = &sinks[t];
    // The thread that reads a page also touches it first, so that the page is near that thread.
    workers[t].prepare = [=] { std::fill(data, data + share, static_cast<uint8_t>(t + 1)); };
    workers[t].work = [=](uint64_t iterations) {
      for (uint64_t i = 0; i < iterations; ++i) {
        *sink += reader(data, share);
        asm volatile("" ::: "memory");
      }
      return static_cast<double>(share) * iterations;
    };
  }
  return run(workers, repetitions, min_s);
}

std::vector<Rate> multiply_rates(const std::string& kind, int num_threads, int repetitions,
                                 double min_s) {
  require(num_threads > 0 && repetitions > 0, "num_threads and repetitions must be positive");
  const Multiplier multiply = best_multiplier(kind).run;
  if (!multiply) throw std::invalid_argument("this CPU has no multiply-add for " + kind);
  const auto work = [=](uint64_t iterations) { return multiply(iterations, nullptr); };
  std::vector<Worker> workers(num_threads, Worker{[] {}, work});
  return run(workers, repetitions, min_s);
}

std::vector<std::string> multiply_kinds() {
  std::vector<std::string> kinds;
  for (const char* kind : {"float32", "int8"})
    if (best_multiplier(kind).run) kinds.push_back(kind);
  return kinds;
}

std::string multiply_isa(const std::string& kind) { return best_multiplier(kind).isa; }

}  // namespace ridgeline
