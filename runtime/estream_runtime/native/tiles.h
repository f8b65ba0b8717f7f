// Products of many token rows: a block of a matrix is made ready for all of them, WIDTH columns at a time.
#pragma once

#include "rows.h"

// Rows of a matrix that are stored: of nibbles, whole groups.
INLINE int64_t stored_rows(const matrix *m) { return m->group ? round_up(m->rows, m->group) : m->rows; }

// What one thread works with.
typedef struct {
    tile tile;
    int32_t sums[TOKENS * WIDTH];
    uint8_t edge[BLOCK * WIDTH]; // a block at the edge of a matrix, filled up
    int8_t edge_multipliers[BLOCK / STRIP * WIDTH];
    const char *rows[TOKENS];
    float row[WIDTH]; // products of one row
} scratch;

// Copies the first `columns` of each row, with zeros up to WIDTH columns and `filled` rows.
static void copy_edge(void *to, const void *from, int64_t stride, int64_t rows, int64_t columns, int64_t filled) {
    memset(to, 0, (size_t)(filled * WIDTH));
    for (int64_t row = 0; row < rows; row++)
        memcpy((char *)to + row * WIDTH, (const char *)from + row * stride, (size_t)columns);
}

// Makes rows k to k + count of columns from n on ready. Returns how many rows that gave, zeros included.
static int64_t fill(scratch *s, const matrix *m, int64_t k, int64_t count, int64_t n) {
    int64_t columns = least(WIDTH, m->columns - n), stride = m->columns;
    if (m->group) {
        const uint8_t *packed = m->weights + k / 2 * stride + n;
        const int8_t *multipliers = m->multipliers + k / m->group * stride + n;
        if (columns < WIDTH) {
            copy_edge(s->edge, packed, stride, count / 2, columns, count / 2);
            copy_edge(s->edge_multipliers, multipliers, stride, count / m->group, columns, count / m->group);
            packed = s->edge, multipliers = s->edge_multipliers, stride = WIDTH;
        }
        fill_nibbles(&s->tile, packed, multipliers, stride, count, m->group);
        return count;
    }
    const int8_t *weights = (const int8_t *)m->weights + k * stride + n;
    int64_t filled = round_up(count, BYTE_ROWS);
    if (columns < WIDTH || filled != count) {
        copy_edge(s->edge, weights, stride, count, columns, filled);
        weights = (const int8_t *)s->edge, stride = WIDTH;
    }
    fill_bytes(&s->tile, weights, stride, filled);
    return filled;
}

// Sums of products of at most TOKENS token rows with rows `from` to `to` of a matrix, whole blocks unless it ends
// there, and WIDTH columns from n on, into s->sums [tokens, WIDTH].
static void sum_tiles(scratch *s, const matrix *m, const char *const *rows, int64_t tokens, int64_t from, int64_t to,
                      int64_t n) {
    int64_t padded = round_up(m->rows, ROW_ALIGNMENT);
    memset(s->sums, 0, (size_t)(tokens * WIDTH) * sizeof *s->sums);
    for (int64_t k = from; k < to; k += BLOCK) {
        int64_t count = fill(s, m, k, least(BLOCK, to - k), n);
        multiply(&s->tile, m->group, rows, k, padded, count, tokens, s->sums);
    }
}
