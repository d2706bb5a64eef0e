// Products of bfloat16 activations with weights of 4 or 8 bits, which become bfloat16 in registers or in the cache.
//
// y[m, n] = sum over k of x[m, k] * w[n, k], and w[n, k] = bf16((code[n, k] - zero[n, g]) * scale[n, g]), g the group of
// column k: the weight rounded as it is when it is dequantized, sums in float32.
//
// A step is 64 columns of a row, two vectors. Codes of 4 bits come as the 32 even columns of the step and the 32 odd
// ones, since a byte holds two neighbours: activations are packed in the same order. Up to FEW tokens a weight is
// multiplied where it was expanded. For more, panels of PANEL rows are expanded into the cache once, and multiplied by
// all tokens, BLOCK at a time: the sums of a panel and a block fill the registers.

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

enum { INT4, FP4, INT8, UINT8, FP8 };  // codes: INT4 and UINT8 have an offset of 8 and 128
enum { BF16, FP16, FP32, E4M3, E8M0 }; // scales
enum { NO_ZERO, PACKED, BYTE };        // zero points: none, codes packed along rows in words of 32 bits, int8

enum {
    STEP = 64,
    PANEL = 4,
    FEW = 4,
    BLOCK = 6,
    DEPTH = 2048, // columns of a block at once: 24 KB, and as much of a panel is 16
};

typedef struct {
    int64_t rows, columns;
    int64_t row_bytes;                 // from one row of the codes to the next
    int64_t groups;                    // scales of a row
    int32_t row_shift, column_shift;   // a scale stands for 2^row_shift rows and 2^column_shift columns
    int32_t codes, scales, zeros;      // kinds
} Shape;

typedef struct {
    Shape of;
    const uint8_t *codes;
    const void *scales, *zeros;
    const float *table;                // what E4M3 and E8M0 scales stand for
} Weight;

#define INLINE static inline __attribute__((always_inline))

// A loop that is to be unrolled, so that what it indexes can lie in registers.
#define EACH(index, count) _Pragma("GCC unroll 8") for (int index = 0; index < (count); index++)

// ---- bfloat16

#ifdef __AVX512BF16__
INLINE __m512 dot(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
INLINE __m512i rounded(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
#else
INLINE __m512 dot(__m512 sum, __m512i a, __m512i b) {
    const __m512i high = _mm512_set1_epi32(0xFFFF0000);
    sum = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(a, 16), (__m512)_mm512_slli_epi32(b, 16), sum);
    return _mm512_fmadd_ps((__m512)_mm512_and_si512(a, high), (__m512)_mm512_and_si512(b, high), sum);
}
INLINE __m256i half_rounded(__m512 values) {   // to nearest, ties to even
    __m512i bits = (__m512i)values;
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
}
INLINE __m512i rounded(__m512 low, __m512 high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(half_rounded(low)), half_rounded(high), 1);
}
#endif

// ---- scales and zero points

INLINE float scale_of(const Weight *w, int64_t row, int64_t group) {
    int64_t at = (row >> w->of.row_shift) * w->of.groups + group;
    if (w->of.scales == BF16) {
        uint32_t bits = (uint32_t)((const uint16_t *)w->scales)[at] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    if (w->of.scales == FP16) return _cvtsh_ss(((const uint16_t *)w->scales)[at]);
    if (w->of.scales == FP32) return ((const float *)w->scales)[at];
    return w->table[((const uint8_t *)w->scales)[at]];
}

INLINE float zero_of(const Weight *w, int64_t row, int64_t group, int bits) {
    if (w->of.zeros == NO_ZERO) return w->of.codes == INT4 ? 8.0f : w->of.codes == UINT8 ? 128.0f : 0.0f;
    if (w->of.zeros == BYTE) {
        float zero = ((const int8_t *)w->zeros)[(row >> w->of.row_shift) * w->of.groups + group];
        return zero + (w->of.codes == INT4 ? 8.0f : w->of.codes == UINT8 ? 128.0f : 0.0f);
    }
    int64_t each = 32 / bits;
    uint32_t word = ((const uint32_t *)w->zeros)[row / each * w->of.groups + group];
    return (float)(word >> (row % each * bits) & ((1u << bits) - 1));
}

// ---- codes to bfloat16

typedef struct {            // what codes of one step become: numbers of a table, or floats by a factor
    __m512i low, high;
    __m512 scale[2], shift[2];
} Meaning;

INLINE __m512 numbers_of_4_bits(int kind) {
    if (kind == INT4) return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6);
}

INLINE __m512 table_of(int kind, const Weight *w, int64_t row, int64_t column) {
    int64_t group = column >> w->of.column_shift;
    if (group >= w->of.groups) group = w->of.groups - 1;
    __m512 numbers = numbers_of_4_bits(kind);
    if (kind == INT4) numbers = _mm512_sub_ps(numbers, _mm512_set1_ps(zero_of(w, row, group, 4)));
    return _mm512_mul_ps(numbers, _mm512_set1_ps(scale_of(w, row, group)));
}

// `grain`: columns that share a scale within a step, 64, 32 or 16.
INLINE void prepare(int kind, int grain, const Weight *w, int64_t row, int64_t column, Meaning *meaning) {
    if (kind == INT4 || kind == FP4) {
        __m512 first = table_of(kind, w, row, column);
        if (grain == 64) {
            meaning->low = rounded(first, first);
        } else if (grain == 32) {
            meaning->low = rounded(first, table_of(kind, w, row, column + 32));
        } else {
            meaning->low = rounded(first, table_of(kind, w, row, column + 16));
            meaning->high = rounded(table_of(kind, w, row, column + 32), table_of(kind, w, row, column + 48));
        }
        return;
    }
    for (int half = 0; half < 2; half++) {
        if (half && grain == 64) {
            meaning->scale[1] = meaning->scale[0];
            meaning->shift[1] = meaning->shift[0];
            break;
        }
        int64_t group = (column + 32 * half) >> w->of.column_shift;
        if (group >= w->of.groups) group = w->of.groups - 1;
        float scale = scale_of(w, row, group);
        if (kind == FP8) {
            scale *= 256.0f;                   // the exponents of E4M3 and of a half differ by 8
        } else {
            meaning->shift[half] = _mm512_set1_ps(zero_of(w, row, group, 8));
        }
        meaning->scale[half] = _mm512_set1_ps(scale);
    }
}

INLINE __m512i expand_half(int kind, __m256i bytes, __m512 scale, __m512 shift) {
    __m512 low, high;
    if (kind == FP8) {
        __m512i bits = _mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7);
        bits = _mm512_and_si512(bits, _mm512_set1_epi16((short)0xBF80));
        low = _mm512_cvtph_ps(_mm512_castsi512_si256(bits));
        high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
    } else {
        __m128i first = _mm256_castsi256_si128(bytes), second = _mm256_extracti128_si256(bytes, 1);
        low = _mm512_cvtepi32_ps(kind == INT8 ? _mm512_cvtepi8_epi32(first) : _mm512_cvtepu8_epi32(first));
        high = _mm512_cvtepi32_ps(kind == INT8 ? _mm512_cvtepi8_epi32(second) : _mm512_cvtepu8_epi32(second));
        low = _mm512_sub_ps(low, shift);
        high = _mm512_sub_ps(high, shift);
    }
    return rounded(_mm512_mul_ps(low, scale), _mm512_mul_ps(high, scale));
}

// 64 codes of a row. `left`: how many columns there are from here to the end of the row.
INLINE void expand(int kind, int grain, const uint8_t *codes, int64_t left, const Meaning *meaning, __m512i out[2]) {
    if (kind == INT4 || kind == FP4) {
        __m256i bytes = left >= STEP ? _mm256_loadu_si256((const __m256i *)codes)
                                     : _mm256_maskz_loadu_epi8((1ull << ((left + 1) / 2)) - 1, codes);
        __m512i even = _mm512_cvtepu8_epi16(bytes), odd = _mm512_srli_epi16(even, 4);
        if (grain == 64) {                     // bit 4 of an index is looked at, and the table is there twice
            out[0] = _mm512_permutexvar_epi16(even, meaning->low);
            out[1] = _mm512_permutexvar_epi16(odd, meaning->low);
            return;
        }
        const __m512i mask = _mm512_set1_epi16(15);
        __m512i places;
        if (grain == 32) {
            places = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
        } else {
            places = _mm512_set_epi64(0x0030003000300030, 0x0030003000300030, 0x0020002000200020, 0x0020002000200020,
                                      0x0010001000100010, 0x0010001000100010, 0, 0);
        }
        even = _mm512_ternarylogic_epi64(even, mask, places, 0xEA);  // (a & b) | c
        odd = _mm512_ternarylogic_epi64(odd, mask, places, 0xEA);
        if (grain == 32) {
            out[0] = _mm512_permutexvar_epi16(even, meaning->low);
            out[1] = _mm512_permutexvar_epi16(odd, meaning->low);
        } else {
            out[0] = _mm512_permutex2var_epi16(meaning->low, even, meaning->high);
            out[1] = _mm512_permutex2var_epi16(meaning->low, odd, meaning->high);
        }
        return;
    }
    for (int half = 0; half < 2; half++) {
        int64_t there = left - 32 * half;
        __m256i bytes = there >= 32 ? _mm256_loadu_si256((const __m256i *)codes + half)
                                    : _mm256_maskz_loadu_epi8(there > 0 ? (1u << there) - 1 : 0, codes + 32 * half);
        out[half] = expand_half(kind, bytes, meaning->scale[half], meaning->shift[half]);
    }
}

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t padded(int64_t columns) { return (columns + STEP - 1) / STEP * STEP; }

// The column at which the scales of a step change next.
INLINE int64_t scale_end(int grain, const Weight *w, int64_t column) {
    if (grain < STEP) return column + STEP;
    return smaller(((column >> w->of.column_shift) + 1) << w->of.column_shift, w->of.columns);
}

// ---- sums of vectors

// Sums of four vectors, in order.
INLINE __m128 sums_of(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512 all = _mm512_add_ps((__m512)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd),
                               (__m512)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

INLINE void store(uint16_t *y, __m128 sums, int64_t count) {
    uint16_t four[8];
    __m512 wide = _mm512_castps128_ps512(sums);
    _mm_storeu_si128((__m128i *)four, _mm512_castsi512_si128(rounded(wide, wide)));
    memcpy(y, four, 2 * count);
}

// ---- activations

// Tokens of a block lie beside each other, 32 columns at a time: [columns / 32, tokens, 32]. Past the end are zeros.
static void pack(int kind, const uint16_t *x, int64_t stride, int64_t tokens, int64_t columns, uint16_t *out) {
    const __m512i evens = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26,
                                           24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odds = _mm512_add_epi16(evens, _mm512_set1_epi16(1));
    for (int64_t column = 0; column < columns; column += STEP) {
        for (int64_t token = 0; token < tokens; token++) {
            const uint16_t *from = x + token * stride + column;
            int64_t left = columns - column;
            __m512i first = _mm512_maskz_loadu_epi16(left >= 32 ? ~0u : (1u << left) - 1, from);
            __m512i second = _mm512_setzero_si512();
            if (left > 32) second = _mm512_maskz_loadu_epi16(left >= 64 ? ~0u : (1u << (left - 32)) - 1, from + 32);
            if (kind == INT4 || kind == FP4) {
                __m512i even = _mm512_permutex2var_epi16(first, evens, second);
                second = _mm512_permutex2var_epi16(first, odds, second);
                first = even;
            }
            uint16_t *to = out + (column * tokens) + token * 32;
            _mm512_storeu_si512(to, first);
            _mm512_storeu_si512(to + tokens * 32, second);
        }
    }
}

// ---- a few tokens

INLINE void few(int kind, int grain, int tokens, const Weight *w, const uint16_t *packed, uint16_t *y, int64_t stride,
                int64_t row) {
    const uint8_t *codes[PANEL];
    const int64_t there = smaller(PANEL, w->of.rows - row);
    const int64_t ahead = PANEL * w->of.row_bytes; // the same place in the next panel is asked for
    const int in_a_byte = kind == INT4 || kind == FP4 ? 2 : 1;
    int64_t rows[PANEL];
    __m512 sum[PANEL][FEW];
    Meaning meaning[PANEL];
    EACH(r, PANEL) {
        rows[r] = row + smaller(r, there - 1); // a row that is not there is the last one again
        codes[r] = w->codes + rows[r] * w->of.row_bytes;
        EACH(t, tokens) sum[r][t] = _mm512_setzero_ps();
    }
    for (int64_t column = 0; column < w->of.columns;) {
        const int64_t end = scale_end(grain, w, column);
        EACH(r, PANEL) prepare(kind, grain, w, rows[r], column, &meaning[r]);
        for (; column < end; column += STEP) {
            const uint16_t *x = packed + column * tokens;
            const int64_t left = w->of.columns - column;
            if (left >= STEP) {
                EACH(r, PANEL) {
                    __m512i weights[2];
                    _mm_prefetch((const char *)codes[r] + column / in_a_byte + ahead, _MM_HINT_T1);
                    expand(kind, grain, codes[r] + column / in_a_byte, STEP, &meaning[r], weights);
                    EACH(t, tokens) {
                        sum[r][t] = dot(sum[r][t], weights[0], _mm512_loadu_si512(x + t * 32));
                        sum[r][t] = dot(sum[r][t], weights[1], _mm512_loadu_si512(x + (tokens + t) * 32));
                    }
                }
            } else {
                EACH(r, PANEL) {
                    __m512i weights[2];
                    expand(kind, grain, codes[r] + column / in_a_byte, left, &meaning[r], weights);
                    EACH(t, tokens) {
                        sum[r][t] = dot(sum[r][t], weights[0], _mm512_loadu_si512(x + t * 32));
                        sum[r][t] = dot(sum[r][t], weights[1], _mm512_loadu_si512(x + (tokens + t) * 32));
                    }
                }
            }
        }
    }
    EACH(t, tokens) store(y + t * stride + row, sums_of(sum[0][t], sum[1][t], sum[2][t], sum[3][t]), there);
}

// ---- many tokens

// Rows from `row` on as panels [columns / 32, PANEL, 32].
INLINE void expand_panel(int kind, int grain, const Weight *w, int64_t row, uint16_t *out) {
    const int four_bits = kind == INT4 || kind == FP4;
    for (int r = 0; r < PANEL; r++) {
        int64_t mine = smaller(row + r, w->of.rows - 1);
        const uint8_t *codes = w->codes + mine * w->of.row_bytes;
        for (int64_t column = 0; column < w->of.columns;) {
            Meaning meaning;
            int64_t end = scale_end(grain, w, column);
            prepare(kind, grain, w, mine, column, &meaning);
            for (; column < end; column += STEP) {
                __m512i weights[2];
                expand(kind, grain, codes + (four_bits ? column / 2 : column), w->of.columns - column, &meaning, weights);
                uint16_t *to = out + column * PANEL + r * 32;
                _mm512_storeu_si512(to, weights[0]);
                _mm512_storeu_si512(to + PANEL * 32, weights[1]);
            }
        }
    }
}

INLINE void block(int tokens, const uint16_t *x, const uint16_t *panel, int64_t columns, float *sums, int64_t stride,
                  int is_first) {
    __m512 sum[PANEL][BLOCK];
    for (int r = 0; r < PANEL; r++)
        for (int t = 0; t < tokens; t++) sum[r][t] = _mm512_setzero_ps();
    for (int64_t column = 0; column < columns; column += 32) {
        __m512i weights[PANEL];
        for (int r = 0; r < PANEL; r++) weights[r] = _mm512_loadu_si512(panel + r * 32);
        for (int t = 0; t < tokens; t++) {
            __m512i values = _mm512_loadu_si512(x + t * 32);
            for (int r = 0; r < PANEL; r++) sum[r][t] = dot(sum[r][t], weights[r], values);
        }
        x += tokens * 32;
        panel += PANEL * 32;
    }
    for (int t = 0; t < tokens; t++) {
        __m128 all = sums_of(sum[0][t], sum[1][t], sum[2][t], sum[3][t]);
        float *to = sums + t * stride;
        if (!is_first) all = _mm_add_ps(all, _mm_loadu_ps(to));
        _mm_storeu_ps(to, all);
    }
}

static void block_of(int tokens, const uint16_t *x, const uint16_t *panel, int64_t columns, float *sums, int64_t stride,
                     int is_first) {
    switch (tokens) {
    case 1: block(1, x, panel, columns, sums, stride, is_first); break;
    case 2: block(2, x, panel, columns, sums, stride, is_first); break;
    case 3: block(3, x, panel, columns, sums, stride, is_first); break;
    case 4: block(4, x, panel, columns, sums, stride, is_first); break;
    case 5: block(5, x, panel, columns, sums, stride, is_first); break;
    default: block(6, x, panel, columns, sums, stride, is_first); break;
    }
}

// ---- for each kind of weight, functions of its own

#define OF_KIND(name, kind, grain)                                                                                     \
    static void few_##name(int tokens, const Weight *w, const uint16_t *packed, uint16_t *y, int64_t stride,           \
                           int64_t row) {                                                                              \
        switch (tokens) {                                                                                              \
        case 1: few(kind, grain, 1, w, packed, y, stride, row); break;                                                 \
        case 2: few(kind, grain, 2, w, packed, y, stride, row); break;                                                 \
        case 3: few(kind, grain, 3, w, packed, y, stride, row); break;                                                 \
        default: few(kind, grain, 4, w, packed, y, stride, row); break;                                                \
        }                                                                                                              \
    }                                                                                                                  \
    static void panel_##name(const Weight *w, int64_t row, uint16_t *out) { expand_panel(kind, grain, w, row, out); }

OF_KIND(int4_64, INT4, 64)
OF_KIND(int4_32, INT4, 32)
OF_KIND(int4_16, INT4, 16)
OF_KIND(fp4_64, FP4, 64)
OF_KIND(fp4_32, FP4, 32)
OF_KIND(fp4_16, FP4, 16)
OF_KIND(int8_64, INT8, 64)
OF_KIND(int8_32, INT8, 32)
OF_KIND(uint8_64, UINT8, 64)
OF_KIND(uint8_32, UINT8, 32)
OF_KIND(fp8_64, FP8, 64)
OF_KIND(fp8_32, FP8, 32)

typedef void (*Few)(int, const Weight *, const uint16_t *, uint16_t *, int64_t, int64_t);
typedef void (*Panel)(const Weight *, int64_t, uint16_t *);

static const struct { int kind, grain; Few few; Panel panel; } KINDS[] = {
    {INT4, 64, few_int4_64, panel_int4_64},   {INT4, 32, few_int4_32, panel_int4_32},
    {INT4, 16, few_int4_16, panel_int4_16},   {FP4, 64, few_fp4_64, panel_fp4_64},
    {FP4, 32, few_fp4_32, panel_fp4_32},      {FP4, 16, few_fp4_16, panel_fp4_16},
    {INT8, 64, few_int8_64, panel_int8_64},   {INT8, 32, few_int8_32, panel_int8_32},
    {UINT8, 64, few_uint8_64, panel_uint8_64}, {UINT8, 32, few_uint8_32, panel_uint8_32},
    {FP8, 64, few_fp8_64, panel_fp8_64},      {FP8, 32, few_fp8_32, panel_fp8_32},
};

// Columns of a step that share a scale.
static int grain_of(const Shape *of) {
    if (of->groups == 1 || of->column_shift >= 6) return 64;
    return 1 << of->column_shift;
}

// Rows expanded at once: 256 KB of bfloat16, which stay in the second cache.
static int64_t rows_at_once(const Shape *of) {
    int64_t rows = of->columns ? (1 << 17) / padded(of->columns) / PANEL * PANEL : PANEL;
    return rows < PANEL ? PANEL : rows > 64 ? 64 : rows;
}

// What the bytes of E4M3 and E8M0 scales stand for. `divisor`: the scale of the whole tensor, or NULL.
static void fill_table(int kind, const float *divisor, float *table) {
    for (int code = 0; code < 256; code++) {
        if (kind == E4M3) {
            table[code] = _cvtsh_ss((code << 7 & 0x3F80) | (code << 8 & 0x8000)) * 256.0f;
            if ((code & 0x7F) == 0x7F) table[code] = NAN;
        } else {
            uint32_t bits = (uint32_t)code << 23;
            memcpy(&table[code], &bits, sizeof bits);
        }
        if (divisor) table[code] /= *divisor;
    }
}

// Bytes of memory that `multiply` works in.
int64_t working_bytes(const Shape *of, int64_t tokens, int64_t threads) {
    int64_t bytes = 2 * tokens * padded(of->columns) + 64;
    if (tokens > FEW) bytes += threads * rows_at_once(of) * (2 * padded(of->columns) + 4 * tokens);
    return bytes;
}

// y [tokens, rows] = x [tokens, columns] times the weight, both bfloat16; strides: elements from one token to the next.
// `memory`: `working_bytes` of it. Returns 0, or 1 where codes and groups are of no kind that is known here.
int multiply(const Shape *of, const void *codes, const void *scales, const void *zeros, const float *divisor,
             const uint16_t *x, int64_t x_stride, uint16_t *y, int64_t y_stride, int64_t tokens, void *memory,
             int64_t threads) {
    int found = -1;
    for (int i = 0; i < (int)(sizeof KINDS / sizeof *KINDS); i++)
        if (KINDS[i].kind == of->codes && KINDS[i].grain == grain_of(of)) found = i;
    if (found < 0) return 1;
    if (!tokens) return 0;
    float table[256];
    if (of->scales == E4M3 || of->scales == E8M0) fill_table(of->scales, divisor, table);
    const Weight weight = {*of, codes, scales, zeros, table}, *w = &weight;
    const int64_t width = padded(of->columns), blocks = (tokens + BLOCK - 1) / BLOCK;
    uint16_t *packed = (uint16_t *)(((uintptr_t)memory + 63) / 64 * 64);
    if (tokens <= FEW) {
        pack(of->codes, x, x_stride, tokens, of->columns, packed);
        #pragma omp parallel for num_threads(threads) schedule(dynamic, 8)
        for (int64_t panel = 0; panel < (of->rows + PANEL - 1) / PANEL; panel++)
            KINDS[found].few((int)tokens, w, packed, y, y_stride, panel * PANEL);
        return 0;
    }
    const int64_t step = rows_at_once(of), own = step * (2 * width + 4 * tokens);
    #pragma omp parallel num_threads(threads)
    {
        #pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {
            int64_t first = tokens * b / blocks, last = tokens * (b + 1) / blocks;
            pack(of->codes, x + first * x_stride, x_stride, last - first, of->columns, packed + first * width);
        }
        uint16_t *weights = (uint16_t *)((char *)(packed + tokens * width) + omp_get_thread_num() * own);
        float *sums = (float *)(weights + step * width);
        #pragma omp for schedule(dynamic, 1)
        for (int64_t run = 0; run < (of->rows + step - 1) / step; run++) {
            int64_t start = run * step, count = smaller(step, of->rows - start);
            for (int64_t row = 0; row < count; row += PANEL) KINDS[found].panel(w, start + row, weights + row * width);
            if (!width) memset(sums, 0, 4 * tokens * step);
            for (int64_t column = 0; column < width; column += DEPTH) {
                int64_t depth = smaller(DEPTH, width - column);
                for (int64_t b = 0; b < blocks; b++) {
                    int64_t first = tokens * b / blocks, size = tokens * (b + 1) / blocks - first;
                    const uint16_t *some = packed + first * width + column * size;
                    for (int64_t row = 0; row < count; row += PANEL)
                        block_of((int)size, some, weights + row * width + column * PANEL, depth,
                                 sums + first * step + row, step, column == 0);
                }
            }
            for (int64_t token = 0; token < tokens; token++)
                for (int64_t row = 0; row < count; row += PANEL)
                    store(y + token * y_stride + start + row, _mm_loadu_ps(sums + token * step + row),
                          smaller(PANEL, count - row));
        }
    }
    return 0;
}

// ---- integers by integers

#ifdef __AVX512VNNI__
INLINE __m512i bytes_of(const int8_t *from, int64_t left) {
    if (left >= 64) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi8((1ull << left) - 1, from);
}

INLINE float rounded_number(float value) {
    uint32_t bits = (uint32_t)_mm256_extract_epi16(_mm512_castsi512_si256(rounded(_mm512_set1_ps(value), _mm512_set1_ps(0))), 0)
                    << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// 16 numbers of bfloat16, zeros past the end.
INLINE __m512 numbers_of(const uint16_t *from, int64_t left) {
    __mmask16 there = left >= 16 ? 0xFFFF : (1u << left) - 1;
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, from)), 16);
}

// One token as int8 and the scale that it then has, each step rounded to bfloat16 as torch rounds it: scale = the
// largest magnitude / (steps / 2), codes = round(x / scale). `given`: the scale, or NULL. `sum`: that of the codes.
static float round_token(const uint16_t *x, int64_t columns, float steps, const float *given, int8_t *codes,
                         int32_t *sum) {
    const __m512 highest = _mm512_set1_ps((steps - 1) / 2), lowest = _mm512_set1_ps(-(steps + 1) / 2);
    float scale;
    if (given) {
        scale = *given;
    } else {
        __m512 largest = _mm512_setzero_ps();
        __mmask16 is_nan = 0;
        for (int64_t column = 0; column < columns; column += 16) {
            __m512 values = _mm512_abs_ps(numbers_of(x + column, columns - column));
            is_nan |= _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
            largest = _mm512_max_ps(largest, values);
        }
        scale = is_nan ? NAN : rounded_number(_mm512_reduce_max_ps(largest) / (steps / 2));
        if (scale == 0) scale = 0.0078125f;    // the epsilon of bfloat16
    }
    __m512i all = _mm512_setzero_si512();
    for (int64_t column = 0; column < columns; column += 16) {
        __m512 ratio = _mm512_div_ps(numbers_of(x + column, columns - column), _mm512_set1_ps(scale));
        ratio = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(rounded(ratio, ratio))), 16);
        ratio = _mm512_min_ps(_mm512_max_ps(_mm512_roundscale_ps(ratio, 0), lowest), highest);
        __m512i numbers = _mm512_cvtps_epi32(ratio);
        __mmask16 there = columns - column >= 16 ? 0xFFFF : (1u << (columns - column)) - 1;
        numbers = _mm512_maskz_mov_epi32(there, numbers);
        all = _mm512_add_epi32(all, numbers);
        _mm_mask_storeu_epi8(codes + column, there, _mm512_cvtepi32_epi8(numbers));
    }
    *sum = _mm512_reduce_add_epi32(all);
    return scale;
}

typedef struct {
    const int8_t *weight;
    const uint16_t *bias;
    const void *scales;
    int64_t rows, columns, row_bytes;
    int32_t scale_kind, is_one_scale;
} Integers;

// The instruction takes unsigned by signed: the weight plus 128, and 128 times the sum of the inputs less.
INLINE void few_integers(int tokens, const Integers *w, const int8_t *x, const int32_t *sums, const float *scales,
                         uint16_t *y, int64_t row) {
    const __m512i offset = _mm512_set1_epi8((char)0x80);
    const int8_t *at[PANEL];
    const int64_t there = smaller(PANEL, w->rows - row), ahead = PANEL * w->row_bytes;
    __m512i sum[PANEL][FEW];
    EACH(r, PANEL) {
        at[r] = w->weight + (row + smaller(r, there - 1)) * w->row_bytes;
        EACH(t, tokens) sum[r][t] = _mm512_setzero_si512();
    }
    int64_t column = 0;
    for (; column + 64 <= w->columns; column += 64) {
        EACH(r, PANEL) {
            _mm_prefetch((const char *)at[r] + column + ahead, _MM_HINT_T1);
            __m512i codes = _mm512_xor_si512(_mm512_loadu_si512(at[r] + column), offset);
            EACH(t, tokens)
                sum[r][t] = _mm512_dpbusd_epi32(sum[r][t], codes, _mm512_loadu_si512(x + t * w->columns + column));
        }
    }
    if (column < w->columns) {
        EACH(r, PANEL) {
            __m512i codes = _mm512_xor_si512(bytes_of(at[r] + column, w->columns - column), offset);
            EACH(t, tokens)
                sum[r][t] = _mm512_dpbusd_epi32(sum[r][t], codes, bytes_of(x + t * w->columns + column, w->columns - column));
        }
    }
    EACH(t, tokens) {
        float out[PANEL];
        EACH(r, PANEL) {
            int64_t scale_row = w->is_one_scale ? 0 : row + smaller(r, there - 1);
            float scale;
            if (w->scale_kind == FP32) {
                scale = ((const float *)w->scales)[scale_row];
            } else {
                uint32_t bits = (uint32_t)((const uint16_t *)w->scales)[scale_row] << 16;
                memcpy(&scale, &bits, sizeof scale);
            }
            out[r] = (float)(_mm512_reduce_add_epi32(sum[r][t]) - 128 * sums[t]) * scales[t] * scale;
            if (w->bias) {
                uint32_t bits = (uint32_t)w->bias[row + smaller(r, there - 1)] << 16;
                float bias;
                memcpy(&bias, &bits, sizeof bias);
                out[r] += bias;
            }
        }
        store(y + t * w->rows + row, _mm_loadu_ps(out), there);
    }
}

// y [tokens, rows] = x [tokens, columns] rounded to int8 times the weight, scaled, plus bias. x, y and bias are bfloat16;
// at most FEW tokens; `memory`: a byte for each number of x. `given`: the scale of x, or NULL for one a token.
int multiply_int8(const int8_t *weight, int64_t row_bytes, int64_t rows, int64_t columns, const void *scales,
                  int64_t scale_kind, int64_t is_one_scale, const uint16_t *bias, const uint16_t *x, int64_t x_stride,
                  double steps, const float *given, uint16_t *y, int64_t tokens, int8_t *memory, int64_t threads) {
    int32_t sums[FEW];
    float own[FEW];
    if (tokens < 1 || tokens > FEW) return 1;
    for (int64_t t = 0; t < tokens; t++)
        own[t] = round_token(x + t * x_stride, columns, (float)steps, given, memory + t * columns, &sums[t]);
    const Integers all = {weight, bias, scales, rows, columns, row_bytes, (int32_t)scale_kind, (int32_t)is_one_scale};
    #pragma omp parallel for num_threads(threads) schedule(dynamic, 8)
    for (int64_t panel = 0; panel < (rows + PANEL - 1) / PANEL; panel++) {
        int64_t row = panel * PANEL;
        switch (tokens) {
        case 1: few_integers(1, &all, memory, sums, own, y, row); break;
        case 2: few_integers(2, &all, memory, sums, own, y, row); break;
        case 3: few_integers(3, &all, memory, sums, own, y, row); break;
        default: few_integers(4, &all, memory, sums, own, y, row); break;
        }
    }
    return 0;
}
#endif
