// Blocks of the loops of GPTQ and SparseGPT: columns are rounded or pruned one after another, and those that follow in
// the block make up for each error. Rows do not know each other: LANES of them are worked on side by side, all columns
// of the block in the first cache, where one operation a column is not worth a call.
//
// Matrices are [rows, in], and pointers are to the first column of the block. `factor` is the upper triangular U of the
// papers, from the block's entry on its diagonal on. What the columns after the block are owed is for the caller:
// `errors` [rows, columns] times the rest of U.

#include <stdint.h>
#include <string.h>

enum { LANES = 16, MOST = 256 }; // MOST: columns of a block, 16 KB

typedef float Lanes __attribute__((vector_size(sizeof(float) * LANES)));

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Halves to even, for magnitudes below 2^22.
static inline float nearest(float value) { return (value + 12582912.0f) - 12582912.0f; }

// Column by column what is stored row by row; rows that are not there are `rest`.
static inline void turn(float to[][LANES], const float *from, int64_t stride, int64_t columns, int64_t count, float rest) {
    for (int64_t l = 0; l < LANES; l++)
        for (int64_t c = 0; c < columns; c++) to[c][l] = l < count ? from[l * stride + c] : rest;
}

static inline void turn_back(float *to, int64_t stride, float from[][LANES], int64_t columns, int64_t count) {
    for (int64_t l = 0; l < count; l++)
        for (int64_t c = 0; c < columns; c++) to[l * stride + c] = from[c][l];
}

static inline void turn_bytes(uint8_t to[][LANES], const uint8_t *from, int64_t stride, int64_t columns, int64_t count) {
    for (int64_t l = 0; l < LANES; l++)
        for (int64_t c = 0; c < columns; c++) to[c][l] = l < count && from[l * stride + c];
}

// Columns after `column` less what the error costs.
static inline void pass_on(float block[][LANES], const float *factor, int64_t stride, int64_t column, int64_t columns,
                           const float error[LANES]) {
    Lanes cost, later;
    memcpy(&cost, error, sizeof cost);
    for (int64_t c = column + 1; c < columns; c++) {
        memcpy(&later, block[c], sizeof later);
        later -= factor[column * stride + c] * cost;
        memcpy(block[c], &later, sizeof later);
    }
}

// The weights `left` become numbers of a grid of integers. `scales` and `zeros` (or NULL) are [rows, groups], `groups`
// the group of each column. Where `kept` (or NULL, of the stride of `left`) is 0, the number is 0.
void round_block(float *left, int64_t left_stride, int64_t rows, int64_t columns, const float *factor, int64_t stride,
                 const float *scales, const float *zeros, int64_t scale_stride, const int64_t *groups,
                 const uint8_t *kept, double lowest, double highest, float *errors, int64_t threads) {
    const float low = (float)lowest, high = (float)highest;
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < rows; first += LANES) {
        const int64_t count = smaller(LANES, rows - first);
        float block[MOST][LANES], lost[MOST][LANES], scale[LANES] = {0}, zero[LANES] = {0};
        uint8_t keep[MOST][LANES];
        int64_t group = -1;
        turn(block, left + first * left_stride, left_stride, columns, count, 0);
        if (kept) turn_bytes(keep, kept + first * left_stride, left_stride, columns, count);
        for (int64_t c = 0; c < columns; c++) {
            if (groups[c] != group) {
                group = groups[c];
                for (int l = 0; l < LANES; l++) scale[l] = l < count ? scales[(first + l) * scale_stride + group] : 1;
                if (zeros)
                    for (int l = 0; l < count; l++) zero[l] = zeros[(first + l) * scale_stride + group];
            }
            if (kept)
                for (int l = 0; l < LANES; l++) block[c][l] = keep[c][l] ? block[c][l] : 0; // what others put there goes
            const float step = 1 / factor[c * stride + c];
            for (int l = 0; l < LANES; l++) {
                float code = block[c][l] / scale[l] + zero[l];
                code = code < low ? low : code > high ? high : code;
                float number = (nearest(code) - zero[l]) * scale[l];
                lost[c][l] = (block[c][l] - number) * step;
                block[c][l] = number;
            }
            pass_on(block, factor, stride, c, columns, lost[c]);
        }
        turn_back(left + first * left_stride, left_stride, block, columns, count);
        turn_back(errors + first * columns, columns, lost, columns, count);
    }
}

// Prunes the weights `left`. `alive` is 0 where one is gone already. With `of` > 0, `keep` becomes the `most` of each
// `of` columns whose pruning would cost most, of equal ones the first; with 0 it is given. Both have the stride of `left`.
void prune_block(float *left, int64_t left_stride, int64_t rows, int64_t columns, const float *factor, int64_t stride,
                 const uint8_t *alive, uint8_t *keep, int64_t most, int64_t of, float *errors, int64_t threads) {
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < rows; first += LANES) {
        const int64_t count = smaller(LANES, rows - first);
        float block[MOST][LANES], lost[MOST][LANES], scores[MOST][LANES];
        uint8_t live[MOST][LANES], stays[MOST][LANES];
        turn(block, left + first * left_stride, left_stride, columns, count, 0);
        turn_bytes(live, alive + first * left_stride, left_stride, columns, count);
        if (of == 0) turn_bytes(stays, keep + first * left_stride, left_stride, columns, count);
        for (int64_t c = 0; c < columns; c++) {
            if (of > 0 && c % of == 0) {
                for (int64_t i = c; i < c + of; i++) {
                    const float diagonal = factor[i * stride + i];
                    for (int l = 0; l < LANES; l++) {
                        const float score = live[i][l] ? block[i][l] / diagonal : 0;
                        scores[i][l] = score < 0 ? -score : score;
                    }
                }
                for (int64_t i = c; i < c + of; i++) {
                    int32_t better[LANES] = {0};
                    for (int64_t j = c; j < c + of; j++)
                        for (int l = 0; l < LANES; l++)
                            better[l] += (scores[j][l] > scores[i][l]) | ((j < i) & (scores[j][l] == scores[i][l]));
                    for (int l = 0; l < LANES; l++) stays[i][l] = (better[l] < most) & live[i][l];
                }
            }
            const float step = 1 / factor[c * stride + c];
            for (int l = 0; l < LANES; l++) {
                lost[c][l] = live[c][l] && !stays[c][l] ? block[c][l] * step : 0;
                block[c][l] = stays[c][l] ? block[c][l] : 0; // what has come to a weight that is gone is lost
            }
            pass_on(block, factor, stride, c, columns, lost[c]);
        }
        turn_back(left + first * left_stride, left_stride, block, columns, count);
        turn_back(errors + first * columns, columns, lost, columns, count);
        if (of > 0)
            for (int64_t l = 0; l < count; l++)
                for (int64_t c = 0; c < columns; c++) keep[(first + l) * left_stride + c] = stays[c][l];
    }
}
