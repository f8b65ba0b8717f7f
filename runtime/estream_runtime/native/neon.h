// Integer products with NEON: `sdot` sums four products of signed bytes in 32 bits, `smmla` eight for each of two rows
// with each of two columns. Both are exact. FORMAT.md annex A.
#pragma once

#include <arm_neon.h>

#include "rows.h"

#ifdef PATH_I8MM
#define DEPTH 8 // rows of a matrix in a vector
#else
#define DEPTH 4
#endif

enum {
    WIDTH = 32, // columns of a tile
    HEIGHT = 8  // token rows that are multiplied at a time
};

// A block of a matrix, made ready: the int8 weights it stands for, [BLOCK / DEPTH][WIDTH][DEPTH].
typedef struct {
    int8x16_t weights[BLOCK * WIDTH / 16];
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

INLINE int8x16_t load_values(const void *from) { return vld1q_s8((const int8_t *)from); }
INLINE int8x16_t low_nibbles(int8x16_t packed) { return vandq_s8(packed, vdupq_n_s8(15)); }
INLINE int8x16_t high_nibbles(int8x16_t packed) {
    return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(packed), 4));
}

INLINE int8x16_t zip_low_16(int8x16_t a, int8x16_t b) {
    return vreinterpretq_s8_s16(vzip1q_s16(vreinterpretq_s16_s8(a), vreinterpretq_s16_s8(b)));
}
INLINE int8x16_t zip_high_16(int8x16_t a, int8x16_t b) {
    return vreinterpretq_s8_s16(vzip2q_s16(vreinterpretq_s16_s8(a), vreinterpretq_s16_s8(b)));
}

// 16 columns of four rows, as 4 vectors of 4 columns with four rows each.
INLINE void interleave(int8x16_t a, int8x16_t b, int8x16_t c, int8x16_t d, int8x16_t out[4]) {
    int8x16_t ab = vzip1q_s8(a, b), cd = vzip1q_s8(c, d);
    out[0] = zip_low_16(ab, cd);
    out[1] = zip_high_16(ab, cd);
    ab = vzip2q_s8(a, b), cd = vzip2q_s8(c, d);
    out[2] = zip_low_16(ab, cd);
    out[3] = zip_high_16(ab, cd);
}

// Puts 16 columns of DEPTH rows, of which the first is row k of the tile, where they belong.
INLINE void arrange(tile *t, int64_t k, int part, const int8x16_t rows[DEPTH]) {
    int8x16_t *out = t->weights + k * (WIDTH / 16) + part * DEPTH;
#ifdef PATH_I8MM
    int8x16_t first[4], second[4];
    interleave(rows[0], rows[1], rows[2], rows[3], first);
    interleave(rows[4], rows[5], rows[6], rows[7], second);
    for (int v = 0; v < 4; v++) {
        int32x4_t a = vreinterpretq_s32_s8(first[v]), b = vreinterpretq_s32_s8(second[v]);
        out[2 * v] = vreinterpretq_s8_s32(vzip1q_s32(a, b));
        out[2 * v + 1] = vreinterpretq_s8_s32(vzip2q_s32(a, b));
    }
#else
    interleave(rows[0], rows[1], rows[2], rows[3], out);
#endif
}

// `count` rows of nibbles, whole groups; `stride` bytes from one row of a part to the next.
static void fill_nibbles(tile *t, const uint8_t *packed, const int8_t *multipliers, int64_t stride, int64_t count,
                         int32_t group) {
    int half = group / 2;
    for (int64_t k = 0; k < count; k += group)
        for (int part = 0; part < WIDTH / 16; part++) {
            int8x16_t m = load_values(multipliers + k / group * stride + part * 16);
            int8x16_t offsets = vmulq_s8(m, vdupq_n_s8(-NIBBLE_ZERO));
            for (int row = 0; row < half; row += DEPTH) {
                int8x16_t low[DEPTH], high[DEPTH];
                const uint8_t *at = packed + (k / 2 + row) * stride + part * 16;
                for (int each = 0; each < DEPTH; each++) {
                    __builtin_prefetch(at + (AHEAD + each) * stride);
                    int8x16_t bytes = load_values(at + each * stride);
                    low[each] = vmlaq_s8(offsets, low_nibbles(bytes), m);
                    high[each] = vmlaq_s8(offsets, high_nibbles(bytes), m);
                }
                arrange(t, k + row, part, low);
                arrange(t, k + row + half, part, high);
            }
        }
}

// `count` rows of int8, a multiple of BYTE_ROWS.
static void fill_bytes(tile *t, const int8_t *weights, int64_t stride, int64_t count) {
    for (int64_t k = 0; k < count; k += DEPTH)
        for (int part = 0; part < WIDTH / 16; part++) {
            const int8_t *at = weights + k * stride + part * 16;
            int8x16_t rows[DEPTH];
            for (int each = 0; each < DEPTH; each++) rows[each] = load_values(at + each * stride);
            arrange(t, k, part, rows);
        }
}

#ifdef PATH_I8MM
// Rows of a block in pairs, as `smmla` takes them: 8 values of one, then of the other.
typedef int8x16_t row_pairs[BLOCK / 8][HEIGHT / 2];

INLINE void pair_rows(const char *const *rows, int64_t k, int64_t count, int tokens, row_pairs pairs) {
    for (int i = 0; i < tokens; i += 2) {
        const char *first = rows[i] + k, *second = rows[i + 1 < tokens ? i + 1 : i] + k;
        for (int64_t at = 0; at < count; at += 16) {
            int64x2_t a = vreinterpretq_s64_s8(load_values(first + at));
            int64x2_t b = vreinterpretq_s64_s8(load_values(second + at));
            pairs[at / 8][i / 2] = vreinterpretq_s8_s64(vzip1q_s64(a, b));
            pairs[at / 8 + 1][i / 2] = vreinterpretq_s8_s64(vzip2q_s64(a, b));
        }
    }
}

// Adds to sums [tokens, WIDTH] the products of `tokens` rows with `columns` columns of a tile.
INLINE void add_columns(const tile *t, int column, int columns, const row_pairs pairs, int64_t count, int tokens,
                        int32_t *sums) {
    int32x4_t each[HEIGHT / 2][8];
    for (int i = 0; i < tokens; i += 2)
        for (int v = 0; v < columns / 2; v++) {
            const int32_t *at = sums + i * WIDTH + column + v * 2;
            each[i / 2][v] = vcombine_s32(vld1_s32(at), vld1_s32(i + 1 < tokens ? at + WIDTH : at));
        }
    for (int64_t step = 0; step < count / 8; step++)
        for (int v = 0; v < columns / 2; v++) {
            int8x16_t w = t->weights[(step * WIDTH + column) / 2 + v];
            for (int i = 0; i < tokens; i += 2) each[i / 2][v] = vmmlaq_s32(each[i / 2][v], pairs[step][i / 2], w);
        }
    for (int i = 0; i < tokens; i += 2)
        for (int v = 0; v < columns / 2; v++) {
            int32_t *at = sums + i * WIDTH + column + v * 2;
            vst1_s32(at, vget_low_s32(each[i / 2][v]));
            if (i + 1 < tokens) vst1_s32(at + WIDTH, vget_high_s32(each[i / 2][v]));
        }
}
#else
// The products of a quarter of 16 values of each row; `quarter` must be a constant, which no loop gives every compiler.
#define ADD_QUARTER(quarter)              \
    for (int v = 0; v < columns / 4; v++) \
        for (int i = 0; i < tokens; i++)  \
    each[i][v] = vdotq_laneq_s32(each[i][v], w[(quarter) * (WIDTH / 4) + v], x[i], quarter)

// Adds to sums [tokens, WIDTH] the products of `tokens` rows with `columns` columns of a tile.
INLINE void add_columns(const tile *t, int column, int columns, const char *const *rows, int64_t k, int64_t count,
                        int tokens, int32_t *sums) {
    int32x4_t each[HEIGHT][4];
    for (int i = 0; i < tokens; i++)
        for (int v = 0; v < columns / 4; v++) each[i][v] = vld1q_s32(sums + i * WIDTH + column + v * 4);
    for (int64_t step = 0; step < count; step += 16) {
        const int8x16_t *w = t->weights + step * (WIDTH / 16) + column / 4;
        int8x16_t x[HEIGHT];
        for (int i = 0; i < tokens; i++) x[i] = load_values(rows[i] + k + step);
        ADD_QUARTER(0);
        ADD_QUARTER(1);
        ADD_QUARTER(2);
        ADD_QUARTER(3);
    }
    for (int i = 0; i < tokens; i++)
        for (int v = 0; v < columns / 4; v++) vst1q_s32(sums + i * WIDTH + column + v * 4, each[i][v]);
}
#endif

INLINE void add_rows(const tile *t, const char *const *rows, int64_t k, int64_t count, int tokens, int32_t *sums) {
    // Either way at most 16 registers of sums: enough to be added to at once, with room for operands.
    const int columns = tokens > HEIGHT / 2 ? 8 : 16;
#ifdef PATH_I8MM
    row_pairs pairs;
    pair_rows(rows, k, count, tokens, pairs);
    for (int at = 0; at < WIDTH; at += columns) add_columns(t, at, columns, pairs, count, tokens, sums);
#else
    for (int at = 0; at < WIDTH; at += columns) add_columns(t, at, columns, rows, k, count, tokens, sums);
#endif
}

// Adds to sums [tokens, WIDTH] the products of rows with a tile that holds rows k to k + count of a matrix.
static void multiply(const tile *t, int32_t group, const char *const *rows, int64_t k, int64_t padded, int64_t count,
                     int64_t tokens, int32_t *sums) {
    (void)group, (void)padded;
    for (int64_t at = 0; at < tokens; at += HEIGHT, rows += HEIGHT, sums += HEIGHT * WIDTH) switch (tokens - at) {
            case 1: add_rows(t, rows, k, count, 1, sums); break;
            case 2: add_rows(t, rows, k, count, 2, sums); break;
            case 3: add_rows(t, rows, k, count, 3, sums); break;
            case 4: add_rows(t, rows, k, count, 4, sums); break;
            case 5: add_rows(t, rows, k, count, 5, sums); break;
            case 6: add_rows(t, rows, k, count, 6, sums); break;
            case 7: add_rows(t, rows, k, count, 7, sums); break;
            default: add_rows(t, rows, k, count, HEIGHT, sums);
        }
}

#include "few_neon.h"
