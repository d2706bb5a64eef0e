// Which n of every m neighbours have the largest magnitudes: m is 2, 4, 8 or 16, so that a register holds whole groups.

#include <immintrin.h>
#include <stdint.h>

enum { WIDE = 16, RUN = 1 << 14 }; // numbers of a register, and of a task

#define INLINE static inline __attribute__((always_inline))

// Magnitudes as integers, which order as they do, NaN above all.
INLINE __m512i magnitudes(const void *values, int64_t at, __mmask16 there, int bytes) {
    if (bytes == 4)
        return _mm512_and_si512(_mm512_maskz_loadu_epi32(there, (const uint32_t *)values + at),
                                _mm512_set1_epi32(0x7FFFFFFF));
    const __m256i halves = _mm256_maskz_loadu_epi16(there, (const uint16_t *)values + at);
    return _mm512_and_si512(_mm512_cvtepu16_epi32(halves), _mm512_set1_epi32(0x7FFF));
}

// How many neighbours stand before each number: larger ones, and equal ones of a lower index.
INLINE __m512i ranks(__m512i bits, int m) {
    const __m512i one = _mm512_set1_epi32(1);
    const __m512i own = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i place = _mm512_and_si512(own, _mm512_set1_epi32(m - 1)), group = _mm512_sub_epi32(own, place);
    __m512i rank = _mm512_setzero_si512();
    for (int distance = 1; distance < m; distance++) {
        const __m512i from = _mm512_and_si512(_mm512_add_epi32(place, _mm512_set1_epi32(distance)), _mm512_set1_epi32(m - 1));
        const __m512i other = _mm512_permutexvar_epi32(_mm512_add_epi32(group, from), bits);
        const __mmask16 tied = _mm512_mask_cmpeq_epi32_mask(_mm512_cmplt_epi32_mask(from, place), other, bits);
        rank = _mm512_mask_add_epi32(rank, tied | _mm512_cmpgt_epi32_mask(other, bits), rank, one);
    }
    return rank;
}

// keep [count] = 1 where a number is among the n of its group of m, whole groups of 2, 4, 8 or 16. `bytes` of a number:
// 2 or 4.
void keep_largest(const void *values, int64_t bytes, int64_t count, int64_t n, int64_t m, uint8_t *keep,
                  int64_t threads) {
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < count; first += RUN) {
        const int64_t last = first + RUN < count ? first + RUN : count;
        for (int64_t at = first; at < last; at += WIDE) {
            const __mmask16 there = last - at >= WIDE ? 0xFFFF : (1u << (last - at)) - 1;
            const __m512i bits = bytes == 4 ? magnitudes(values, at, there, 4) : magnitudes(values, at, there, 2);
            const __m512i rank = m == 4 ? ranks(bits, 4) : ranks(bits, (int)m);
            const __mmask16 kept = _mm512_cmplt_epi32_mask(rank, _mm512_set1_epi32((int)n));
            _mm_mask_storeu_epi8(keep + at, there, _mm_maskz_set1_epi8(kept, 1));
        }
    }
}

// How many groups have more than n numbers that are not 0.
int64_t count_violations(const void *values, int64_t bytes, int64_t count, int64_t n, int64_t m, int64_t threads) {
    int64_t broken = 0;
    #pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : broken)
    for (int64_t first = 0; first < count; first += RUN) {
        const int64_t last = first + RUN < count ? first + RUN : count;
        for (int64_t at = first; at < last; at += WIDE) {
            const __mmask16 there = last - at >= WIDE ? 0xFFFF : (1u << (last - at)) - 1;
            const __m512i bits = bytes == 4 ? magnitudes(values, at, there, 4) : magnitudes(values, at, there, 2);
            const unsigned some = _mm512_test_epi32_mask(bits, bits);
            for (int64_t group = 0; group < WIDE; group += m)
                broken += __builtin_popcount(some >> group & ((1u << m) - 1)) > n;
        }
    }
    return broken;
}
