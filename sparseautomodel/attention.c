// softmax(scale * query key^T) value in bfloat16, the scores and their softmax in float32: whole rows, all heads.
//
// Keys and values are packed first, so that neighbours in a register are 16 keys, or 16 numbers of a value, and each
// holds two numbers that one instruction multiplies and adds: [width / 2, keys, 2] and [keys / 2, width, 2]. Then a
// block of QUERIES is worked on, whose sums with 4 registers of keys or of values fill the registers: all their scores,
// their softmax, and the sum of values.

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <omp.h>

enum { QUERIES = 6, KEYS = 64, RUN = 48 }; // RUN: queries of one head that are one task

#define INLINE static inline __attribute__((always_inline))
#define EACH(index, count) _Pragma("GCC unroll 8") for (int index = 0; index < (count); index++)

typedef struct {
    int64_t batch, heads, shared, tokens, width, out_width;
    int64_t query[3], key[3], value[3], result[3]; // strides: from one row, head and token to the next
    int64_t causal;
    double scale;
} Attention;

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t padded(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// e^x for x <= 0; relative error 2^-22.
INLINE __m512 exponential(__m512 x) {
    const __m512 low = _mm512_set1_ps(-87.0f);
    const __mmask16 is_zero = _mm512_cmp_ps_mask(x, low, _CMP_LT_OQ);
    __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
    rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), rest);
    __m512 power = _mm512_set1_ps(1.9875691500e-4f);
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(1.3981999507e-3f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(8.3334519073e-3f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(4.1665795894e-2f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(1.6666665459e-1f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(5.0000001201e-1f));
    power = _mm512_fmadd_ps(power, _mm512_mul_ps(rest, rest), _mm512_add_ps(rest, _mm512_set1_ps(1)));
    return _mm512_mask_mov_ps(_mm512_scalef_ps(power, whole), is_zero, _mm512_setzero_ps());
}

INLINE __m512 dot(__m512 sum, __m512i a, uint32_t pair) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)_mm512_set1_epi32((int)pair));
}

// Keys past the last are zeros.
static void pack_keys(const Attention *of, const uint16_t *key, uint32_t *out) {
    const int64_t keys = padded(of->tokens, KEYS), stride = of->key[2];
    for (int64_t first = 0; first < keys; first += 16) {
        for (int64_t pair = 0; pair < of->width / 2; pair++) {
            uint32_t *to = out + pair * keys + first;
            for (int64_t k = 0; k < 16; k++) {
                to[k] = 0;
                if (first + k < of->tokens) memcpy(to + k, key + (first + k) * stride + 2 * pair, sizeof *to);
            }
        }
    }
}

static void pack_values(const Attention *of, const uint16_t *value, uint32_t *out) {
    for (int64_t pair = 0; pair < padded(of->tokens, KEYS) / 2; pair++) {
        const uint16_t *first = value + 2 * pair * of->value[2], *second = first + of->value[2];
        const int has_first = 2 * pair < of->tokens, has_second = 2 * pair + 1 < of->tokens;
        for (int64_t c = 0; c < of->out_width; c++)
            out[pair * of->out_width + c] =
                (uint32_t)(has_first ? first[c] : 0) | (uint32_t)(has_second ? second[c] : 0) << 16;
    }
}

// Scores of `count` queries with KEYS keys.
INLINE void score(int count, const uint32_t *query, int64_t pairs, const uint32_t *keys, int64_t stride, float scale,
                  float *scores, int64_t score_stride) {
    __m512 sum[QUERIES][KEYS / 16];
    EACH(q, count) EACH(k, KEYS / 16) sum[q][k] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; pair++) {
        __m512i some[KEYS / 16];
        EACH(k, KEYS / 16) some[k] = _mm512_loadu_si512(keys + pair * stride + 16 * k);
        EACH(q, count) EACH(k, KEYS / 16) sum[q][k] = dot(sum[q][k], some[k], query[q * pairs + pair]);
    }
    EACH(q, count) EACH(k, KEYS / 16)
        _mm512_storeu_ps(scores + q * score_stride + 16 * k, _mm512_mul_ps(sum[q][k], _mm512_set1_ps(scale)));
}

// The sum of values of QUERIES queries, 16 * `wide` numbers of it.
INLINE void add_values(int wide, const uint32_t *shares, int64_t share_stride, int64_t pairs, const uint32_t *values,
                       int64_t stride, const float *inverse, float *out) {
    __m512 sum[QUERIES][4];
    EACH(q, QUERIES) EACH(c, wide) sum[q][c] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; pair++) {
        __m512i some[4];
        EACH(c, wide) some[c] = _mm512_loadu_si512(values + pair * stride + 16 * c);
        EACH(q, QUERIES) EACH(c, wide) sum[q][c] = dot(sum[q][c], some[c], shares[q * share_stride + pair]);
    }
    EACH(q, QUERIES) EACH(c, wide)
        _mm512_storeu_ps(out + q * 64 + 16 * c, _mm512_mul_ps(sum[q][c], _mm512_set1_ps(inverse[q])));
}

// Up to QUERIES queries of one head, from `first` on.
static void block(const Attention *of, const uint16_t *query, const uint32_t *keys, const uint32_t *values,
                  uint16_t *result, int64_t first, float *memory) {
    const int64_t count = smaller(QUERIES, of->tokens - first), all = padded(of->tokens, KEYS), pairs = of->width / 2;
    const int64_t seen = of->causal ? first + count : of->tokens, some = padded(seen, KEYS);
    float *scores = memory, inverse[QUERIES], out[QUERIES * 64];
    uint32_t *packed = (uint32_t *)(memory + QUERIES * all), *shares = packed + QUERIES * pairs;
    memset(packed, 0, QUERIES * pairs * sizeof *packed);
    for (int64_t q = 0; q < count; q++)
        memcpy(packed + q * pairs, query + (first + q) * of->query[2], 2 * of->width);
    for (int64_t k = 0; k < some; k += KEYS)
        score(QUERIES, packed, pairs, keys + k, all, (float)of->scale, scores + k, all);
    for (int64_t q = 0; q < QUERIES; q++) {
        float *mine = scores + q * all;
        const int64_t end = of->causal ? smaller(first + q + 1, of->tokens) : of->tokens;
        for (int64_t k = end; k < some; k++) mine[k] = -INFINITY;
        __m512 largest = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
        __mmask16 is_nan = 0;
        for (int64_t k = 0; k < some; k += 16) {
            __m512 values_of = _mm512_loadu_ps(mine + k);
            is_nan |= _mm512_cmp_ps_mask(values_of, values_of, _CMP_UNORD_Q);
            largest = _mm512_max_ps(largest, values_of);
        }
        const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
        for (int64_t k = 0; k < some; k += 16) {
            __m512 share = exponential(_mm512_sub_ps(_mm512_loadu_ps(mine + k), most));
            sum = _mm512_add_ps(sum, share);
            _mm256_storeu_si256((__m256i *)((uint16_t *)(shares + q * all / 2) + k), (__m256i)_mm512_cvtneps_pbh(share));
        }
        inverse[q] = is_nan ? NAN : 1 / _mm512_reduce_add_ps(sum);
    }
    for (int64_t c = 0; c < of->out_width; c += 64) {
        const int64_t wide = smaller(64, of->out_width - c);
        const uint32_t *part = values + c;
        switch (wide / 16) {
        case 1: add_values(1, shares, all / 2, some / 2, part, of->out_width, inverse, out); break;
        case 2: add_values(2, shares, all / 2, some / 2, part, of->out_width, inverse, out); break;
        case 3: add_values(3, shares, all / 2, some / 2, part, of->out_width, inverse, out); break;
        default: add_values(4, shares, all / 2, some / 2, part, of->out_width, inverse, out); break;
        }
        for (int64_t q = 0; q < count; q++)
            for (int64_t i = 0; i < wide; i += 16)
                _mm256_storeu_si256((__m256i *)(result + (first + q) * of->result[2] + c + i),
                                    (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(out + q * 64 + i)));
    }
}

static int64_t packed_size(const Attention *of) { // of one head of keys, in pairs
    return padded(of->tokens, KEYS) / 2 * (of->width + of->out_width);
}

static int64_t own_size(const Attention *of) { // of one thread, in floats
    return QUERIES * (padded(of->tokens, KEYS) / 2 * 3 + of->width / 2);
}

// Bytes of memory that `attend` works in.
int64_t attention_bytes(const Attention *of, int64_t threads) {
    return 4 * (of->batch * of->shared * packed_size(of) + threads * own_size(of));
}

// All of bfloat16, and the numbers of a token without gaps; out_width is a multiple of 16, width of 2.
void attend(const Attention *of, const uint16_t *query, const uint16_t *key, const uint16_t *value, uint16_t *result,
            uint32_t *memory, int64_t threads) {
    const int64_t runs = (of->tokens + RUN - 1) / RUN, group = of->heads / of->shared;
    const int64_t size = packed_size(of), keys = padded(of->tokens, KEYS) / 2 * of->width;
    #pragma omp parallel num_threads(threads)
    {
        #pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < of->batch * of->shared; i++) {
            const int64_t row = i / of->shared, head = i % of->shared;
            pack_keys(of, key + row * of->key[0] + head * of->key[1], memory + i * size);
            pack_values(of, value + row * of->value[0] + head * of->value[1], memory + i * size + keys);
        }
        float *own = (float *)(memory + of->batch * of->shared * size) + omp_get_thread_num() * own_size(of);
        #pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < of->batch * of->heads * runs; i++) {
            const int64_t run = i % runs, head = i / runs % of->heads, row = i / runs / of->heads;
            const uint32_t *packed = memory + (row * of->shared + head / group) * size;
            for (int64_t first = run * RUN; first < smaller(of->tokens, (run + 1) * RUN); first += QUERIES)
                block(of, query + row * of->query[0] + head * of->query[1], packed, packed + keys,
                      result + row * of->result[0] + head * of->result[1], first, own);
        }
    }
}
