// Products of token rows with stored matrices, and what stands between them in a layer. FORMAT.md sections 7 and 10,
// annex A; called through ctypes (library.py), which asserts what it is given.
//
// Compiled once for each path with that path's flags. Every path gives the same integers; floats may differ in their
// last bits from path to path, never with the number of threads, and in attention alone with the number of token rows.
// Stored weights may lie at any address, floats at any multiple of 4.
#include <math.h>
#include <stdint.h>

#include "cpu.h"
#include "pool.h"
#include "rows.h"

#if defined(PATH_AVX512VNNI) || defined(PATH_AVXVNNI)
#include "vnni.h"
#elif defined(PATH_AVX2)
#include "avx2.h"
#elif defined(PATH_I8MM) || defined(PATH_DOTPROD)
#include "neon.h"
#elif defined(PATH_PLAIN)
#include "plain.h"
#else
#error "which path?"
#endif

#include "attention.h"
#include "floats.h"

#define EXPORT __attribute__((visibility("default")))

// What one thread works with.
typedef struct {
    tile tile;
    int32_t sums[TOKENS * WIDTH];
    uint8_t edge[BLOCK * WIDTH]; // a block at the edge of a matrix, filled up
    int8_t edge_multipliers[BLOCK / STRIP * WIDTH];
    const char *rows[TOKENS];
    float row[FEW_WIDTH]; // products of one row
} scratch;

_Static_assert(FEW_WIDTH >= WIDTH, "a row holds the columns of any task");

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

// Sums of products of at most TOKENS rows (s->rows) with WIDTH columns from n on, into `sums` [tokens, WIDTH].
static void sum_tiles(scratch *s, const matrix *m, int64_t tokens, int64_t n, int32_t *sums) {
    int64_t rows = m->group ? round_up(m->rows, m->group) : m->rows, padded = round_up(m->rows, ROW_ALIGNMENT);
    memset(sums, 0, (size_t)(tokens * WIDTH) * sizeof *sums);
    for (int64_t k = 0; k < rows; k += BLOCK) {
        int64_t count = fill(s, m, k, least(BLOCK, rows - k), n);
        multiply(&s->tile, m->group, s->rows, k, padded, count, tokens, sums);
    }
}

#if FEW
_Static_assert(FEW *(FEW_WIDTH + WIDTH) <= TOKENS * WIDTH, "sums hold few rows, and what is left of them");

// Columns that a task takes: for few rows its share of all, since memory is read best in long stretches.
INLINE int64_t strip_width(const pool *p, int64_t tokens, int64_t columns) {
    return tokens > FEW ? WIDTH : least(FEW_WIDTH, round_up(parts(columns, p->threads), 32));
}

// Sums of products with `columns` columns from n on, into s->sums, rows of `pitch`: FEW_WIDTH for few rows, or WIDTH.
static void sum_products(scratch *s, const matrix *m, int64_t tokens, int64_t n, int64_t columns, int64_t pitch) {
    if (pitch == WIDTH) { // also for the last few of many rows
        sum_tiles(s, m, tokens, n, s->sums);
        return;
    }
    int64_t whole = columns / 32 * 32;
    if (tokens == 1)
        few_columns(m, s->rows, 1, n, whole, s->sums);
    else
        few_columns(m, s->rows, 2, n, whole, s->sums);
    if (whole == columns) return;
    int32_t *rest = s->sums + FEW * FEW_WIDTH;
    sum_tiles(s, m, tokens, n + whole, rest);
    for (int64_t i = 0; i < tokens; i++)
        memcpy(s->sums + i * FEW_WIDTH + whole, rest + i * WIDTH, (size_t)(columns - whole) * sizeof *rest);
}
#else
INLINE int64_t strip_width(const pool *p, int64_t tokens, int64_t columns) {
    return (void)p, (void)tokens, (void)columns, WIDTH;
}

static void sum_products(scratch *s, const matrix *m, int64_t tokens, int64_t n, int64_t columns, int64_t pitch) {
    (void)columns, (void)pitch;
    sum_tiles(s, m, tokens, n, s->sums);
}
#endif

// Which rows a call takes: `chosen` of them, or all in order.
INLINE int64_t row_of(const int64_t *chosen, int64_t at) { return chosen ? chosen[at] : at; }

static void point_to_rows(scratch *s, const quantised *x, const int64_t *chosen, int64_t from, int64_t tokens) {
    for (int64_t i = 0; i < tokens; i++) s->rows[i] = x->data + row_of(chosen, from + i) * x->stride;
}

typedef struct {
    const pool *pool;
    const quantised *x;
    const int64_t *chosen; // rows of x, or NULL for all in order
    int64_t tokens;
    const matrix *m, *up;  // y = x @ m, or what the activation makes of x @ m and x @ up
    const quantised *up_x; // x as `up` takes it
    float limit;           // of the activation `clamped-swiglu`, or 0: silu(x @ m) * (x @ up)
    float *y;              // by token, unless `targets` says to which rows shares of the products are added
    const int64_t *targets;
    const float *shares;
} products;

// Products of one row with `columns` columns of a matrix from n on, as floats.
INLINE void scale_row(const int32_t *sums, float row_scale, const matrix *m, int64_t n, int64_t columns, float *y) {
    for (int64_t each = 0; each < columns; each++) y[each] = ((float)sums[each] * row_scale) * m->scale[n + each];
    if (m->bias)
        for (int64_t each = 0; each < columns; each++) y[each] += m->bias[n + each];
}

// Task: a strip of columns for at most TOKENS rows.
static void multiply_strip(const void *call, int64_t number, int thread) {
    const products *c = call;
    scratch *s = scratch_of(c->pool, thread);
    const matrix *m = c->m;
    int64_t width = strip_width(c->pool, c->tokens, m->columns), strips = parts(m->columns, width);
    int64_t pitch = c->tokens > FEW ? WIDTH : FEW_WIDTH; // of sums
    int64_t n = number % strips * width, from = number / strips * TOKENS;
    int64_t tokens = least(TOKENS, c->tokens - from), columns = least(width, m->columns - n);
    point_to_rows(s, c->x, c->chosen, from, tokens);
    sum_products(s, m, tokens, n, columns, pitch);
    for (int64_t i = 0; i < tokens; i++) {
        float row_scale = c->x->scale[row_of(c->chosen, from + i)];
        if (!c->targets) {
            scale_row(s->sums + i * pitch, row_scale, m, n, columns, c->y + (from + i) * m->columns + n);
            continue;
        }
        float *y = c->y + c->targets[from + i] * m->columns + n, share = c->shares[from + i];
        scale_row(s->sums + i * pitch, row_scale, m, n, columns, s->row);
        for (int64_t each = 0; each < columns; each++) y[each] += share * s->row[each];
    }
    if (!c->up) return;
    point_to_rows(s, c->up_x, c->chosen, from, tokens);
    sum_products(s, c->up, tokens, n, columns, pitch);
    for (int64_t i = 0; i < tokens; i++) {
        float *y = c->y + (from + i) * m->columns + n, *up = s->row;
        scale_row(s->sums + i * pitch, c->up_x->scale[row_of(c->chosen, from + i)], c->up, n, columns, up);
        if (c->limit > 0)
            for (int64_t each = 0; each < columns; each++) y[each] = clamped_swiglu(y[each], up[each], c->limit);
        else
            for (int64_t each = 0; each < columns; each++) y[each] = silu(y[each]) * up[each];
    }
}

static void run_products(pool *p, const products *c) {
    run_tasks(p, multiply_strip, c,
              parts(c->m->columns, strip_width(p, c->tokens, c->m->columns)) * parts(c->tokens, TOKENS));
}

typedef struct {
    const float *x;
    int64_t tokens, columns, stride;
    int32_t group;
    char *data;
    float *scale;
} quantising;

// Task: one token row. FORMAT.md annex A: scale max|x| / 127, or 1 where that is 0; x / scale rounded half to even.
static void quantise_row(const void *call, int64_t number, int thread) {
    (void)thread;
    const quantising *c = call;
    const float *x = c->x + number * c->columns;
    char *row = c->data + number * c->stride;
    int64_t padded = round_up(c->columns, ROW_ALIGNMENT);
    float largest = largest_of(x, c->columns), scale = largest / 127;
    if (scale == 0) scale = 1;
    c->scale[number] = scale; // what is not finite makes every product of the row so
    for (int64_t at = 0; at < padded; at += ROW_ALIGNMENT) {
        int8_t values[ROW_ALIGNMENT] = {0};
        if (isfinite(scale)) {
            int64_t count = least(ROW_ALIGNMENT, c->columns - at);
            if (count == ROW_ALIGNMENT)
                round_values(x + at, scale, ROW_ALIGNMENT, values);
            else
                round_values(x + at, scale, count, values);
        }
        store_values(row, c->group, padded, at, values);
    }
}

// Whether the path of this name runs on this processor: to be asked of the plain path, which runs on every one.
EXPORT int32_t kernel_runs_on(const char *path) { return runs_here(path); }

// Threads for one caller at a time, the caller among them. NULL where memory is wanting.
EXPORT pool *kernel_open(int32_t threads) { return open_pool(threads, sizeof(scratch)); }

EXPORT void kernel_close(pool *p) { close_pool(p); }

// Bytes of a quantised row that meets matrices of this group.
EXPORT int64_t kernel_row_bytes(int32_t group, int64_t columns) { return row_bytes(group, columns); }

// Quantises x [tokens, columns] to rows of kernel_row_bytes each, and scale [tokens].
EXPORT void kernel_quantise(pool *p, const float *x, int64_t tokens, int64_t columns, int32_t group, char *data,
                            float *scale) {
    quantising c = {x, tokens, columns, row_bytes(group, columns), group, data, scale};
    run_tasks(p, quantise_row, &c, tokens);
}

// y [tokens, N] = x @ m, biases added.
EXPORT void kernel_product(pool *p, const char *data, const float *scale, int64_t tokens, const matrix *m, float *y) {
    quantised x = {data, scale, row_bytes(m->group, m->rows)};
    run_products(p, &(products){.pool = p, .x = &x, .tokens = tokens, .m = m, .y = y});
}

// total[chosen] += shares * expert(x[chosen]); no row is chosen twice. `up_data` is the same rows as `data`, in the
// form that `up` meets. The activation is silu where `limit` is 0, or else clamped-swiglu of that limit. Returns 0, or
// 1 where memory is wanting.
EXPORT int32_t kernel_expert(pool *p, const char *data, const float *scale, const char *up_data, const int64_t *chosen,
                             const float *shares, int64_t tokens, const matrix *gate, const matrix *up,
                             const matrix *down, float limit, float *total) {
    if (!tokens) return 0;
    int64_t inner = gate->columns, stride = row_bytes(down->group, inner);
    size_t hidden_bytes = (size_t)round_up(tokens * inner * 4, 64), row_scale_bytes = (size_t)round_up(tokens * 4, 64);
    char *room = workspace(p, hidden_bytes + row_scale_bytes + (size_t)(tokens * stride));
    if (!room) return 1;
    float *hidden = (float *)room, *hidden_scale = (float *)(room + hidden_bytes);
    char *hidden_rows = room + hidden_bytes + row_scale_bytes;
    quantised x = {data, scale, row_bytes(gate->group, gate->rows)};
    quantised up_x = {up_data, scale, row_bytes(up->group, up->rows)};
    run_products(p, &(products){.pool = p,
                                .x = &x,
                                .chosen = chosen,
                                .tokens = tokens,
                                .m = gate,
                                .up = up,
                                .up_x = &up_x,
                                .limit = limit,
                                .y = hidden});
    kernel_quantise(p, hidden, tokens, inner, down->group, hidden_rows, hidden_scale);
    quantised h = {hidden_rows, hidden_scale, stride};
    run_products(
        p,
        &(products){.pool = p, .x = &h, .targets = chosen, .tokens = tokens, .m = down, .shares = shares, .y = total});
    return 0;
}

typedef struct {
    const float *x, *weight, *bias;
    float epsilon;
    int64_t columns;
    float *y;
} norming;

static void norm_task(const void *call, int64_t number, int thread) {
    (void)thread;
    const norming *c = call;
    norm_row(c->x + number * c->columns, c->weight, c->bias, c->epsilon, c->columns, c->y + number * c->columns);
}

// y [tokens, columns] = RMS norm of x, times weight [columns]; or layer norm, where there is a bias [columns]. y may be
// x.
EXPORT void kernel_norm(pool *p, const float *x, const float *weight, const float *bias, float epsilon, int64_t tokens,
                        int64_t columns, float *y) {
    norming c = {x, weight, bias, epsilon, columns, y};
    run_tasks(p, norm_task, &c, tokens);
}

typedef struct {
    const float *x, *cosine, *sine;
    int64_t tokens, heads, width, rotated;
    float *y;
} rotating;

static void rotate_task(const void *call, int64_t number, int thread) {
    (void)thread;
    const rotating *c = call;
    int64_t rotated = c->rotated;
    for (int64_t head = 0; head < c->heads; head++) {
        const float *x = c->x + (number * c->heads + head) * c->width;
        float *y = c->y + (head * c->tokens + number) * c->width;
        if (rotated) rotate_row(x, c->cosine + number * rotated, c->sine + number * rotated, rotated, y);
        memcpy(y + rotated, x + rotated, (size_t)(c->width - rotated) * sizeof *y);
    }
}

// y [heads, tokens, width] = x [tokens, heads * width], the first `rotated` numbers of each head rotated by cosine and
// sine [tokens, rotated], which may be NULL where there are none.
EXPORT void kernel_rotate(pool *p, const float *x, const float *cosine, const float *sine, int64_t tokens,
                          int64_t heads, int64_t width, int64_t rotated, float *y) {
    rotating c = {x, cosine, sine, tokens, heads, width, rotated, y};
    run_tasks(p, rotate_task, &c, tokens);
}

// `shared` heads of keys [length, width] and of values [length, value_width], strides in floats; sinks [heads] or NULL.
// y [tokens, heads * value_width]: softmax(queries @ keys' * scale + mask, beside the sinks) @ values. Returns 0, or 1
// where memory is wanting.
EXPORT int32_t kernel_attend(pool *p, const float *queries, const float *keys, const float *values, const float *mask,
                             const float *sinks, int64_t heads, int64_t shared, int64_t tokens, int64_t length,
                             int64_t width, int64_t value_width, int64_t key_stride, int64_t value_stride, float scale,
                             float *y) {
    char *room = workspace(p, attention_bytes(width, value_width) * (size_t)p->threads);
    if (!room) return 1;
    attending c = {.pool = p,
                   .queries = queries,
                   .keys = keys,
                   .values = values,
                   .mask = mask,
                   .sinks = sinks,
                   .y = y,
                   .heads = heads,
                   .shared = shared,
                   .tokens = tokens,
                   .length = length,
                   .width = width,
                   .value_width = value_width,
                   .key_stride = key_stride,
                   .value_stride = value_stride,
                   .scale = scale,
                   .room = room};
    run_tasks(p, attend_rows, &c, heads * parts(tokens, QUERIES));
    return 0;
}

typedef struct {
    const float *x, *m;
    int64_t tokens, rows, columns;
    float *y;
} mixing;

enum { MIXED = 24 }; // token rows of a task: whole sixes, see `mix`

static void mix_task(const void *call, int64_t number, int thread) {
    (void)thread;
    const mixing *c = call;
    int64_t from = number * MIXED;
    mix(c->x + from * c->rows, c->rows, c->m, c->columns, c->rows, least(MIXED, c->tokens - from), c->columns,
        c->y + from * c->columns, c->columns, 0);
}

// y [tokens, columns] = x [tokens, rows] @ m [rows, columns], all f32.
EXPORT void kernel_mix(pool *p, const float *x, const float *m, int64_t tokens, int64_t rows, int64_t columns,
                       float *y) {
    mixing c = {x, m, tokens, rows, columns, y};
    run_tasks(p, mix_task, &c, parts(tokens, MIXED));
}
