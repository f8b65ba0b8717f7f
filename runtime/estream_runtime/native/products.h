// What becomes of sums of integer products, and such products of many token rows. FORMAT.md sections 7 and 10, annex A.
#pragma once

#include <math.h>

#include "floats.h"
#include "pool.h"
#include "tiles.h"

// Products of one row with `columns` columns of a matrix from n on, as floats.
INLINE void scale_row(const int32_t *sums, float row_scale, const matrix *m, int64_t n, int64_t columns, float *y) {
    for (int64_t each = 0; each < columns; each++) y[each] = ((float)sums[each] * row_scale) * m->scale[n + each];
    if (m->bias)
        for (int64_t each = 0; each < columns; each++) y[each] += m->bias[n + each];
}

// Adds a share of a row, rounded before it is added, so that it makes no difference who adds it. Compilers round once
// what stands in one loop.
INLINE void add_share(float share, float *row, int64_t columns, float *y) {
    for (int64_t each = 0; each < columns; each++) row[each] *= share;
    for (int64_t each = 0; each < columns; each++) y[each] += row[each];
}

// What the activation makes of gate and up, in the place of gate: `clamped-swiglu` of a limit, or silu where that is 0.
INLINE void activate(float *gate, const float *up, float limit, int64_t columns) {
    if (limit > 0)
        for (int64_t each = 0; each < columns; each++) gate[each] = clamped_swiglu(gate[each], up[each], limit);
    else
        for (int64_t each = 0; each < columns; each++) gate[each] = silu(gate[each]) * up[each];
}

// Rounds one token row to integers. FORMAT.md annex A: scale max|x| / 127, or 1 where that is 0; x / scale rounded half
// to even.
static void quantise_row(const float *x, int64_t columns, int32_t group, char *row, float *row_scale) {
    int64_t padded = round_up(columns, ROW_ALIGNMENT);
    float largest = largest_of(x, columns), scale = largest / 127;
    if (scale == 0) scale = 1;
    *row_scale = scale; // what is not finite makes every product of the row so
    for (int64_t at = 0; at < padded; at += ROW_ALIGNMENT) {
        int8_t values[ROW_ALIGNMENT] = {0};
        if (isfinite(scale)) {
            int64_t count = least(ROW_ALIGNMENT, columns - at);
            if (count == ROW_ALIGNMENT)
                round_values(x + at, scale, ROW_ALIGNMENT, values);
            else
                round_values(x + at, scale, count, values);
        }
        store_values(row, group, padded, at, values);
    }
}

typedef struct {
    const float *x;
    int64_t tokens, columns, stride;
    int32_t group;
    char *data;
    float *scale;
} quantising;

static void quantise_task(const void *call, int64_t number, int thread) {
    (void)thread;
    const quantising *c = call;
    quantise_row(c->x + number * c->columns, c->columns, c->group, c->data + number * c->stride, c->scale + number);
}

// Which rows a call takes: `chosen` of them, or all in order.
INLINE int64_t row_of(const int64_t *chosen, int64_t at) { return chosen ? chosen[at] : at; }

typedef struct {
    const pool *pool;
    const quantised *x;
    const int64_t *chosen; // rows of x, or NULL for all in order
    int64_t tokens;
    const matrix *m, *up;  // y = x @ m, or what the activation makes of x @ m and x @ up
    const quantised *up_x; // x as `up` takes it
    float limit;           // of the activation
    float *y;              // by token, unless `targets` says to which rows shares of the products are added
    const int64_t *targets;
    const float *shares;
} products;

// Sums of at most TOKENS rows from `from` on with WIDTH columns of a matrix.
static void sum_strip(scratch *s, const products *c, const quantised *x, const matrix *m, int64_t from, int64_t tokens,
                      int64_t n) {
    for (int64_t i = 0; i < tokens; i++) s->rows[i] = x->data + row_of(c->chosen, from + i) * x->stride;
    sum_tiles(s, m, s->rows, tokens, 0, stored_rows(m), n);
}

// Task: a strip of columns for at most TOKENS rows.
static void multiply_strip(const void *call, int64_t number, int thread) {
    const products *c = call;
    scratch *s = scratch_of(c->pool, thread);
    const matrix *m = c->m;
    int64_t strips = parts(m->columns, WIDTH), n = number % strips * WIDTH, from = number / strips * TOKENS;
    int64_t tokens = least(TOKENS, c->tokens - from), columns = least(WIDTH, m->columns - n);
    sum_strip(s, c, c->x, m, from, tokens, n);
    for (int64_t i = 0; i < tokens; i++) {
        float row_scale = c->x->scale[row_of(c->chosen, from + i)];
        if (!c->targets) {
            scale_row(s->sums + i * WIDTH, row_scale, m, n, columns, c->y + (from + i) * m->columns + n);
            continue;
        }
        scale_row(s->sums + i * WIDTH, row_scale, m, n, columns, s->row);
        add_share(c->shares[from + i], s->row, columns, c->y + c->targets[from + i] * m->columns + n);
    }
    if (!c->up) return;
    sum_strip(s, c, c->up_x, c->up, from, tokens, n);
    for (int64_t i = 0; i < tokens; i++) {
        scale_row(s->sums + i * WIDTH, c->up_x->scale[row_of(c->chosen, from + i)], c->up, n, columns, s->row);
        activate(c->y + (from + i) * m->columns + n, s->row, c->limit, columns);
    }
}

static void run_products(pool *p, const products *c) {
    run_tasks(p, multiply_strip, c, parts(c->m->columns, WIDTH) * parts(c->tokens, TOKENS));
}
