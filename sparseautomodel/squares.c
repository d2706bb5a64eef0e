// Sums of squares of each column of bfloat16 numbers, in float32 over PART tokens and in float64 over those.

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { PART = 64 }; // tokens of a task, so that threads change no bit

#define EACH(index, count) _Pragma("GCC unroll 8") for (int index = 0; index < (count); index++)

// Add those of `count` rows, next to each other in memory, so that they are read in order.
static inline __attribute__((always_inline)) void add(int count, const uint16_t *x, int64_t stride, int64_t columns,
                                                      float *sums) {
    for (int64_t column = 0; column < columns; column += 16) {
        const int64_t left = columns - column;
        const __mmask16 there = left >= 16 ? 0xFFFF : (1u << left) - 1;
        __m512 sum = _mm512_maskz_loadu_ps(there, sums + column);
        EACH(t, count) {
            const __m256i bits = _mm256_maskz_loadu_epi16(there, x + t * stride + column);
            const __m512 value = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
            sum = _mm512_fmadd_ps(value, value, sum);
        }
        _mm512_mask_storeu_ps(sums + column, there, sum);
    }
}

// Add to sums [columns] those of x [tokens, columns]; `stride`: elements from one token to the next.
// `memory`: `columns` floats for every PART tokens.
void squares(const uint16_t *x, int64_t stride, int64_t tokens, int64_t columns, double *sums, float *memory,
             int64_t threads) {
    const int64_t parts = (tokens + PART - 1) / PART;
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t last = (part + 1) * PART < tokens ? (part + 1) * PART : tokens;
        int64_t token = part * PART;
        float *mine = memory + part * columns;
        memset(mine, 0, columns * sizeof *mine);
        for (; token + 4 <= last; token += 4) add(4, x + token * stride, stride, columns, mine);
        for (; token < last; token++) add(1, x + token * stride, stride, columns, mine);
    }
    for (int64_t part = 0; part < parts; part++)
        for (int64_t column = 0; column < columns; column++) sums[column] += memory[part * columns + column];
}
