// Integer products in plain C, for any processor. FORMAT.md annex A.
#pragma once

#include "rows.h"

enum { WIDTH = 32 };
#define FEW 0 // no token rows are too few for a tile
#define FEW_WIDTH WIDTH

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
