// Products of bfloat16 activations with weights that have two numbers in every four (2:4), of which half is computed.
//
// y[m, n] = sum over k of x[m, k] * w[n, k], sums in float32. A panel is ROWS rows of the weight. Of each four columns a
// register holds the two numbers of every row, and 64 bits their columns, two bits each. Numbers of a token are loaded
// WINDOW at a time, and permuted to the columns of the weight: one instruction then multiplies and adds 16 pairs. So
// the rate of permutations is the limit: 1.3 products a cycle on Zen 5 where dense weights have 2, each worth two.

#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

enum {
    ROWS = 16,
    WINDOW = 32,       // columns: 8 groups of four
    BLOCK = 12,        // tokens, whose sums and numbers fill the registers
    DEPTH = 1024,      // columns at once, whose weights stay in the first cache
    CACHED = 1 << 20   // bytes of activations that stay in the second
};

#define INLINE static inline __attribute__((always_inline))
#define EACH(index, count) _Pragma("GCC unroll 12") for (int index = 0; index < (count); index++)

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Groups of four columns.
static inline int64_t groups_of(int64_t columns) { return (columns + 3) / 4; }

// Split `weight` [rows, columns] into pairs [panels, groups, ROWS] and their columns [panels, groups]. Returns 0, or 1
// where three numbers of a group are not 0.
int split(const uint16_t *weight, int64_t stride, int64_t rows, int64_t columns, uint32_t *pairs, uint64_t *places,
          int64_t threads) {
    const int64_t groups = groups_of(columns), panels = (rows + ROWS - 1) / ROWS;
    int dense = 0;
    #pragma omp parallel for num_threads(threads) reduction(| : dense)
    for (int64_t panel = 0; panel < panels; panel++) {
        for (int64_t g = 0; g < groups; g++) places[panel * groups + g] = 0;
        for (int64_t r = 0; r < ROWS; r++) {
            const int64_t row = panel * ROWS + r;
            const uint16_t *from = weight + row * stride;
            for (int64_t g = 0; g < groups; g++) {
                uint16_t four[4] = {0};
                if (row < rows) memcpy(four, from + 4 * g, 2 * smaller(4, columns - 4 * g));
                unsigned there = 0;
                for (int i = 0; i < 4; i++) there |= (unsigned)((four[i] & 0x7FFF) != 0) << i;
                // the lowest that is there, and the highest; the other end where there is none or one
                const int low = there ? __builtin_ctz(there) : 0, high = there ? 31 - __builtin_clz(there) : 3;
                const int first = low == high && low == 3 ? 0 : low, second = low == high && low != 3 ? 3 : high;
                dense |= (there & ~(1u << first) & ~(1u << second)) != 0;
                pairs[(panel * groups + g) * ROWS + r] = (uint32_t)four[first] | (uint32_t)four[second] << 16;
                places[panel * groups + g] |= (uint64_t)(first | second << 2) << 4 * r;
            }
        }
    }
    return dense;
}

// The columns of a group's pairs, as indices into a window: 32 words.
INLINE __m512i spread(uint64_t places, int group) {
    const __m512i shifts = _mm512_set1_epi64(0x0006000400020000);
    __m128i bytes = _mm_cvtsi64_si128((long long)places);
    __m512i words = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), // byte i / 4 for word i
        _mm512_set_epi64(0x8007800780078007, 0x8006800680068006, 0x8005800580058005, 0x8004800480048004,
                         0x8003800380038003, 0x8002800280028002, 0x8001800180018001, 0x8000800080008000));
    words = _mm512_and_si512(_mm512_srlv_epi16(words, shifts), _mm512_set1_epi16(3));
    return _mm512_add_epi16(words, _mm512_set1_epi16((short)(4 * group)));
}

typedef struct {
    const uint32_t *pairs;
    const uint64_t *places;
    const uint16_t *bias; // or NULL
    int64_t rows, columns;
} Weight;

// Part of a product: a panel, and its columns from `first` to `last`.
typedef struct {
    const Weight *w;
    int64_t panel, first, last;
    const __m512i *indices; // of the groups of these columns; NULL for all columns at once
    uint16_t *y;
    int64_t y_stride;
} Part;

static inline int64_t windows_of(int64_t columns) { return (columns + WINDOW - 1) / WINDOW; }

// `count` tokens as [windows, count, WINDOW]: in order of use, and not in rows that may lie 4096 bytes apart, which a
// cache does not hold together.
static void pack(const uint16_t *x, int64_t stride, int64_t count, int64_t columns, uint16_t *out) {
    for (int64_t t = 0; t < count; t++) {
        for (int64_t window = 0; window < windows_of(columns); window++) {
            const int64_t left = smaller(WINDOW, columns - window * WINDOW);
            const __mmask32 there = left == WINDOW ? 0xFFFFFFFF : (1u << left) - 1;
            const __m512i numbers = _mm512_maskz_loadu_epi16(there, x + t * stride + window * WINDOW);
            _mm512_store_si512(out + (window * count + t) * WINDOW, numbers);
        }
    }
}

// `count` tokens by a part; `y` of the first. `sums`: what columns before these have come to, and then with them.
INLINE void block(int count, int is_ready, const Part *of, const uint16_t *packed, uint16_t *y, float *sums) {
    const Weight *w = of->w;
    const int64_t groups = groups_of(w->columns), row = of->panel * ROWS;
    const __mmask16 rows = w->rows - row < ROWS ? (1u << (w->rows - row)) - 1 : 0xFFFF;
    const uint32_t *pairs = w->pairs + (of->panel * groups + of->first / 4) * ROWS;
    const uint64_t *places = w->places + of->panel * groups + of->first / 4;
    __m512 sum[BLOCK];
    EACH(t, count) sum[t] = of->first ? _mm512_loadu_ps(sums + t * ROWS) : _mm512_setzero_ps();
    int64_t at = 0;
    for (int64_t column = of->first; column < of->last; column += WINDOW) {
        __m512i numbers[BLOCK];
        EACH(t, count) numbers[t] = _mm512_load_si512(packed + (column / WINDOW * count + t) * WINDOW);
        const int some = (int)groups_of(smaller(WINDOW, of->last - column));
        for (int g = 0; g < some; g++, at++) {
            const __m512bh weight = (__m512bh)_mm512_loadu_si512(pairs + at * ROWS);
            const __m512i index = is_ready ? of->indices[at] : spread(places[at], g);
            EACH(t, count)
                sum[t] = _mm512_dpbf16_ps(sum[t], (__m512bh)_mm512_permutexvar_epi16(index, numbers[t]), weight);
        }
    }
    if (of->last < w->columns) {
        EACH(t, count) _mm512_storeu_ps(sums + t * ROWS, sum[t]);
        return;
    }
    __m512 bias = _mm512_setzero_ps();
    if (w->bias) bias = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(rows, w->bias + row)), 16);
    EACH(t, count)
        _mm256_mask_storeu_epi16(y + t * of->y_stride + row, rows, (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(sum[t], bias)));
}

static void block_of(int count, const Part *of, const uint16_t *packed, uint16_t *y, float *sums) {
    #define FEW(n) case n: block(n, 0, of, packed, y, sums); return;
    #define MANY(n) case n: block(n, 1, of, packed, y, sums); return;
    if (of->indices) switch (count) { MANY(6) MANY(7) MANY(8) MANY(9) MANY(10) MANY(11) MANY(12) }
    switch (count) { FEW(1) FEW(2) FEW(3) FEW(4) FEW(5) FEW(6) FEW(7) FEW(8) FEW(9) FEW(10) FEW(11) FEW(12) }
}

// Blocks of tokens that are worked on with one panel, so that their numbers stay in the second cache.
static int64_t blocks_at_once(const Weight *w, int64_t blocks) {
    const int64_t most = CACHED / (2 * BLOCK * (w->columns + 1)) + 1, chunks = (blocks + most - 1) / most;
    return (blocks + chunks - 1) / chunks;
}

// Bytes of memory that `multiply_pairs` works in.
int64_t pairs_bytes(const Weight *w, int64_t tokens, int64_t threads) {
    const int64_t packed = tokens * windows_of(w->columns) * WINDOW * 2 + 64;
    if (tokens <= BLOCK) return packed;
    return packed + threads * (DEPTH / 4 * 64 + blocks_at_once(w, (tokens + BLOCK - 1) / BLOCK) * BLOCK * ROWS * 4);
}

// y [tokens, rows] = x [tokens, columns] times the weight, and its bias; strides: elements from one token to the next.
// `memory`: `pairs_bytes` of it; with `is_packed`, as it was left by a call with the same x.
void multiply_pairs(const Weight *w, const uint16_t *x, int64_t x_stride, int64_t is_packed, uint16_t *y,
                    int64_t y_stride, int64_t tokens, void *memory, int64_t threads) {
    const int64_t panels = (w->rows + ROWS - 1) / ROWS, groups = groups_of(w->columns);
    const int64_t width = windows_of(w->columns) * WINDOW, blocks = (tokens + BLOCK - 1) / BLOCK;
    uint16_t *packed = (uint16_t *)(((uintptr_t)memory + 63) / 64 * 64);
    if (blocks <= 1) {
        if (!is_packed) pack(x, x_stride, tokens, w->columns, packed);
        #pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
        for (int64_t panel = 0; panel < panels; panel++) {
            const Part part = {w, panel, 0, w->columns, NULL, y, y_stride};
            block_of((int)tokens, &part, packed, y, NULL);
        }
        return;
    }
    const int64_t step = blocks_at_once(w, blocks);
    #pragma omp parallel num_threads(threads)
    {
        __m512i *indices = (__m512i *)(packed + tokens * width) + omp_get_thread_num() * (DEPTH / 4 + step * BLOCK);
        float *sums = (float *)(indices + DEPTH / 4);
        #pragma omp for schedule(static)
        for (int64_t b = 0; b < (is_packed ? 0 : blocks); b++) {
            const int64_t token = tokens * b / blocks, count = tokens * (b + 1) / blocks - token;
            pack(x + token * x_stride, x_stride, count, w->columns, packed + token * width);
        }
        for (int64_t start = 0; start < blocks; start += step) {
            #pragma omp for schedule(dynamic, 2) nowait // two: a line of y is 32 rows
            for (int64_t panel = 0; panel < panels; panel++) {
                for (int64_t first = 0; first < w->columns; first += DEPTH) {
                    const int64_t last = smaller(w->columns, first + DEPTH);
                    const Part part = {w, panel, first, last, indices, y, y_stride};
                    const uint64_t *places = w->places + panel * groups + first / 4;
                    for (int64_t g = 0; g < groups_of(part.last - first); g++) indices[g] = spread(places[g], g % 8);
                    for (int64_t b = start; b < smaller(blocks, start + step); b++) {
                        const int64_t token = tokens * b / blocks, count = tokens * (b + 1) / blocks - token;
                        block_of((int)count, &part, packed + token * width, y + token * y_stride,
                                 sums + (b - start) * BLOCK * ROWS);
                    }
                }
            }
        }
    }
}
