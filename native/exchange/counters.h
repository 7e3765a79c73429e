// Counters in memory that several processes share. A process that waits spins for a few microseconds
// and then sleeps in the kernel, because the other process may need its core to get on.
#pragma once
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <time.h>

namespace ridgeline {

constexpr int64_t kSpinNs = 20000;    // before the first sleep
constexpr int64_t kSleepNs = 5000000;  // the longest until `aborted` is read again

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1000000000 + t.tv_nsec;
}

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps while the counter is `value`, at most kSleepNs.
inline void sleep_on(const uint32_t* counter, uint32_t value) {
  timespec wait = {0, kSleepNs};
#if defined(__linux__)
  syscall(SYS_futex, counter, FUTEX_WAIT, value, &wait, nullptr, 0);
#else
  (void)counter, (void)value;
  wait.tv_nsec = 50000;
  nanosleep(&wait, nullptr);
#endif
}

// Sets a counter, after all that was written before, and wakes those that wait for it.
inline void publish(uint32_t* counter, uint32_t value) {
  __atomic_store_n(counter, value, __ATOMIC_RELEASE);
#if defined(__linux__)
  syscall(SYS_futex, counter, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

// Waits until `count` counters, `stride` bytes apart, have reached `value` (modulo 2^32). False if
// `aborted` is set or `timeout_ns` pass.
inline bool wait_for(const char* first, int count, int64_t stride, uint32_t value,
                     const uint32_t* aborted, int64_t timeout_ns) {
  const int64_t began = now_ns();
  for (int i = 0; i < count; ++i) {
    const uint32_t* counter = reinterpret_cast<const uint32_t*>(first + i * stride);
    for (;;) {
      int64_t waited = 0;
      uint32_t now = 0;
      for (int spin = 0; spin < 64; ++spin) {
        now = __atomic_load_n(counter, __ATOMIC_ACQUIRE);
        if (static_cast<int32_t>(now - value) >= 0) break;
        pause_cpu();
      }
      if (static_cast<int32_t>(now - value) >= 0) break;
      waited = now_ns() - began;
      if (__atomic_load_n(aborted, __ATOMIC_ACQUIRE) || waited > timeout_ns) return false;
      if (waited > kSpinNs) sleep_on(counter, now);
    }
  }
  return true;
}

}  // namespace ridgeline
