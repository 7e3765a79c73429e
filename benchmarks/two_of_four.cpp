// One row times an INT8 matrix of which two in four weights remain, against the dense matrix and
// INT4: what a CPU kernel for 2:4 sparsity could gain. One thread, AVX2, sums proven equal.
//
//   g++ -O3 -march=native -o two_of_four benchmarks/two_of_four.cpp && ./two_of_four 8192 4096 60
//
// Outputs lie in panels of eight. Bytes per panel and 32 inputs:
//   dense INT8   256   four adjacent inputs of each output in a 32-bit lane
//   2:4 INT8     160   32 bytes of positions (2 bits each), then 128 bytes of the weights that remain
//   INT4         128   nibbles, the scales of the groups left out

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

namespace {

constexpr int kPanel = 8;
constexpr int kAhead = 2048;  // bytes prefetched ahead

template <typename T>
T load_as(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof(T));
    return value;
}

__m256i load(const uint8_t* at) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(at)); }

void prefetch(const uint8_t* at) {
    _mm_prefetch(reinterpret_cast<const char*>(at + kAhead), _MM_HINT_T0);
}

__m256i add_products(__m256i sum, __m256i unsigned_bytes, __m256i signed_bytes) {
    const __m256i pairs = _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

void store(int32_t* to, __m256i a, __m256i b) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_add_epi32(a, b));
}

void dense_int8(const uint8_t* w, const uint8_t* x, int num_out, int num_in, int32_t* y) {
    for (int panel = 0; panel < num_out / kPanel; ++panel) {
        __m256i a = _mm256_setzero_si256(), b = a;
        for (int k = 0; k < num_in; k += 8, w += 64) {
            prefetch(w);
            a = add_products(a, _mm256_set1_epi32(load_as<int32_t>(x + k)), load(w));
            b = add_products(b, _mm256_set1_epi32(load_as<int32_t>(x + k + 4)), load(w + 32));
        }
        store(y + panel * kPanel, a, b);
    }
}

// The inputs that meet the remaining weights are gathered from eight by a byte shuffle.
template <int Step>
__m256i sparse_step(__m256i sum, __m256i positions, const uint8_t* w, const uint8_t* x) {
    const __m256i second_four = _mm256_set1_epi32(0x04040000);
    const __m256i at = _mm256_or_si256(
        _mm256_and_si256(_mm256_srli_epi16(positions, 2 * Step), _mm256_set1_epi8(3)),
        second_four);
    const __m256i eight = _mm256_set1_epi64x(load_as<int64_t>(x + 8 * Step));
    return add_products(sum, _mm256_shuffle_epi8(eight, at), load(w + 32 + 32 * Step));
}

void two_of_four(const uint8_t* w, const uint8_t* x, int num_out, int num_in, int32_t* y) {
    for (int panel = 0; panel < num_out / kPanel; ++panel) {
        __m256i a = _mm256_setzero_si256(), b = a;
        for (int k = 0; k < num_in; k += 32, w += 160) {
            for (int line = 0; line < 160; line += 64) prefetch(w + line);
            const __m256i positions = load(w);
            a = sparse_step<0>(a, positions, w, x + k);
            b = sparse_step<1>(b, positions, w, x + k);
            a = sparse_step<2>(a, positions, w, x + k);
            b = sparse_step<3>(b, positions, w, x + k);
        }
        store(y + panel * kPanel, a, b);
    }
}

void int4(const uint8_t* w, const uint8_t* x, int num_out, int num_in, int32_t* y) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int panel = 0; panel < num_out / kPanel; ++panel) {
        __m256i a = _mm256_setzero_si256(), b = a;
        for (int k = 0; k < num_in; k += 8, w += 32) {
            prefetch(w);
            const __m256i codes = load(w);
            const __m256i high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low);
            const __m256i first = _mm256_set1_epi32(load_as<int32_t>(x + k));
            const __m256i second = _mm256_set1_epi32(load_as<int32_t>(x + k + 4));
            a = add_products(a, _mm256_and_si256(codes, low), first);
            b = add_products(b, high, second);
        }
        store(y + panel * kPanel, a, b);
    }
}

uint8_t* allocate(size_t size) {
    constexpr size_t kPage = size_t{2} << 20;
    void* found = std::aligned_alloc(kPage, (size + kPage - 1) / kPage * kPage);
    if (found == nullptr) std::abort();
    std::memset(found, 0, size);
    return static_cast<uint8_t*>(found);
}

struct Matrices {
    uint8_t* dense;
    uint8_t* sparse;
    uint8_t* nibbles;
};

Matrices make(int num_out, int num_in, std::mt19937& random) {
    const size_t size = size_t(num_out) * num_in;
    Matrices made{allocate(size), allocate(size * 5 / 8), allocate(size / 2)};
    for (size_t i = 0; i < size / 2; ++i) made.nibbles[i] = uint8_t(random());
    for (int out = 0; out < num_out; ++out) {
        const size_t panel = out / kPanel, lane = out % kPanel;
        for (int four = 0; four < num_in / 4; ++four) {
            const size_t step = four / 2 % 4, half = four % 2;
            uint8_t* block = made.sparse + panel * kPanel * num_in * 5 / 8 + four / 8 * 160;
            int kept[2] = {int(random() % 4), int(random() % 3)};
            kept[1] += kept[1] >= kept[0];
            for (size_t i = 0; i < 2; ++i) {
                const auto weight = uint8_t(int(random() % 127) - 63);
                const size_t byte = lane * 4 + 2 * half + i;
                made.dense[panel * kPanel * num_in + four * 32 + lane * 4 + kept[i]] = weight;
                block[byte] |= uint8_t(kept[i] << (2 * step));
                block[32 + 32 * step + byte] = weight;
            }
        }
    }
    return made;
}

}  // namespace

int main(int argc, char** argv) {
    const int num_out = argc > 1 ? std::atoi(argv[1]) : 8192;
    const int num_in = argc > 2 ? std::atoi(argv[2]) : 4096;
    const int rounds = argc > 3 ? std::atoi(argv[3]) : 60;
    if (num_out % kPanel || num_in % 32 || rounds < 1) return 2;
    std::mt19937 random(1);
    const Matrices w = make(num_out, num_in, random);
    std::vector<uint8_t> x(num_in);
    for (auto& value : x) value = uint8_t(random() % 64);
    std::vector<int32_t> y[3];
    std::vector<double> times_ms[3];
    for (auto& sums : y) sums.resize(num_out);
    const auto time = [&](int at, auto multiply, const uint8_t* weights) {
        const auto begun = std::chrono::steady_clock::now();
        multiply(weights, x.data(), num_out, num_in, y[at].data());
        const std::chrono::duration<double, std::milli> took =
            std::chrono::steady_clock::now() - begun;
        times_ms[at].push_back(took.count());
    };
    for (int round = 0; round < rounds; ++round) {
        time(0, dense_int8, w.dense);
        time(1, two_of_four, w.sparse);
        time(2, int4, w.nibbles);
    }
    const char* names[] = {"dense INT8", "2:4 INT8", "INT4"};
    for (int at = 0; at < 3; ++at) {
        std::sort(times_ms[at].begin(), times_ms[at].end());
        std::printf("%-10s  fastest %.3f  median %.3f ms\n", names[at], times_ms[at][0],
                    times_ms[at][rounds / 2]);
    }
    return y[0] == y[1] ? 0 : 1;
}
