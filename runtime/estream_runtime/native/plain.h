// Integer products in plain C, for any processor. FORMAT.md annex A.
#pragma once

#include "rows.h"

enum { WIDTH = 32 };
#define FEW 2 // most token rows for which nothing is made ready

// A block of a matrix, made ready: the int8 weights it stands for, row-major.
typedef struct {
    int8_t weights[BLOCK][WIDTH];
} tile;

// What a quantised row holds: int8.
INLINE int64_t row_bytes(int32_t group, int64_t columns) {
    (void)group;
    return round_up(columns, ROW_ALIGNMENT);
}

// Puts the values from `at` on into a quantised row, as many as ROW_ALIGNMENT.
INLINE void store_values(char *row, int32_t group, int64_t padded, int64_t at, const int8_t *values) {
    (void)group, (void)padded;
    memcpy(row + at, values, ROW_ALIGNMENT);
}

static void fill_nibbles(tile *t, const uint8_t *packed, const int8_t *multipliers, int64_t stride, int64_t count,
                         int32_t group) {
    int half = group / 2;
    for (int64_t k = 0; k < count; k += group)
        for (int row = 0; row < half; row++)
            for (int n = 0; n < WIDTH; n++) {
                int byte = packed[(k / 2 + row) * stride + n], m = multipliers[k / group * stride + n];
                t->weights[k + row][n] = (int8_t)(((byte & 15) - NIBBLE_ZERO) * m);
                t->weights[k + row + half][n] = (int8_t)(((byte >> 4) - NIBBLE_ZERO) * m);
            }
}

static void fill_bytes(tile *t, const int8_t *weights, int64_t stride, int64_t count) {
    for (int64_t k = 0; k < count; k++) memcpy(t->weights[k], weights + k * stride, WIDTH);
}

static void multiply(const tile *t, int32_t group, const char *const *rows, int64_t k, int64_t padded, int64_t count,
                     int64_t tokens, int32_t *sums) {
    (void)group, (void)padded;
    for (int64_t token = 0; token < tokens; token++) {
        const int8_t *x = (const int8_t *)rows[token] + k;
        int32_t *sum = sums + token * WIDTH;
        for (int64_t row = 0; row < count; row++)
            for (int n = 0; n < WIDTH; n++) sum[n] += x[row] * t->weights[row][n];
    }
}

// Products of `tokens` rows (1 or 2) with rows `from` to `to` of a matrix, and `width` columns from `column` on: sums
// [tokens, pitch].
static void few_columns(const matrix *m, const char *const *rows, int tokens, int64_t from, int64_t to, int64_t column,
                        int64_t width, int32_t *sums, int64_t pitch) {
    int64_t half = m->group / 2;
    for (int i = 0; i < tokens; i++) {
        const int8_t *x = (const int8_t *)rows[i];
        int32_t *sum = sums + i * pitch;
        memset(sum, 0, (size_t)width * sizeof *sum);
        for (int64_t k = from; k < to; k++) {
            if (!m->group) {
                const int8_t *w = (const int8_t *)m->weights + k * m->columns + column;
                for (int64_t n = 0; n < width; n++) sum[n] += x[k] * w[n];
                continue;
            }
            int64_t group = k / m->group, row = k % m->group;
            const uint8_t *packed = m->weights + (group * half + row % half) * m->columns + column;
            const int8_t *multipliers = m->multipliers + group * m->columns + column;
            int shift = row < half ? 0 : 4;
            for (int64_t n = 0; n < width; n++)
                sum[n] += x[k] * (((packed[n] >> shift & 15) - NIBBLE_ZERO) * multipliers[n]);
        }
    }
}
