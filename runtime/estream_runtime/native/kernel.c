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
#include "few_products.h"
#include "floats.h"
#include "products.h"

#define EXPORT __attribute__((visibility("default")))

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
    run_tasks(p, quantise_task, &c, tokens);
}

// y [tokens, N] = x @ m, biases added. Returns 0, or 1 where memory is wanting.
EXPORT int32_t kernel_product(pool *p, const char *data, const float *scale, int64_t tokens, const matrix *m,
                              float *y) {
    quantised x = {data, scale, row_bytes(m->group, m->rows)};
    if (!tokens) return 0;
    if (tokens <= FEW) return multiply_few(p, &(forms){.of = {x, x}}, (int)tokens, &m, 1, y);
    run_products(p, &(products){.pool = p, .x = &x, .tokens = tokens, .m = m, .y = y});
    return 0;
}

// What a norm takes besides its row: see norm_row.
typedef struct {
    const float *weight, *bias;
    float epsilon;
} norm;

// y = norm(x [K]) @ matrices, [N] of each, one after the other, biases added; without a norm where it is NULL. Returns
// 0, or 1 where memory is wanting.
EXPORT int32_t kernel_row(pool *p, const float *x, const norm *before, int64_t count, const matrix *const *matrices,
                          float *y) {
    int64_t columns = matrices[0]->rows;
    float *normed = before ? malloc((size_t)columns * sizeof *normed) : NULL;
    if (before && !normed) return 1;
    if (before) norm_row(x, before->weight, before->bias, before->epsilon, columns, normed);
    forms rows;
    int failed =
        quantise_for(&rows, before ? normed : x, matrices, count) || multiply_few(p, &rows, 1, matrices, count, y);
    free(rows.memory);
    free(normed);
    return failed;
}

// One row through the end of an attention block: x [N] = attended [K] @ m + residual [N]; normed [N] = norm(x); and
// where there is a router [N, experts], scores = normed @ router + bias. Returns 0, or 1 where memory is wanting.
EXPORT int32_t kernel_row_out(pool *p, const float *attended, const matrix *m, const float *residual, const norm *after,
                              const float *router, const float *bias, int64_t experts, float *x, float *normed,
                              float *scores) {
    if (kernel_row(p, attended, NULL, 1, &m, x)) return 1;
    for (int64_t n = 0; n < m->columns; n++) x[n] += residual[n];
    norm_row(x, after->weight, after->bias, after->epsilon, m->columns, normed);
    if (router) mix(normed, m->columns, router, experts, m->columns, 1, experts, scores, experts, 0);
    for (int64_t n = 0; router && bias && n < experts; n++) scores[n] += bias[n];
    return 0;
}

// total[chosen] += shares * expert(x[chosen]); no row is chosen twice. `up_data` is the same rows as `data`, in the
// form that `up` meets. The activation is silu where `limit` is 0, or else clamped-swiglu of that limit. Returns 0, or
// 1 where memory is wanting.
EXPORT int32_t kernel_expert(pool *p, const char *data, const float *scale, const char *up_data, const int64_t *chosen,
                             const float *shares, int64_t tokens, const expert *e, float limit, float *total) {
    if (!tokens) return 0;
    const matrix *gate = &e->gate, *up = &e->up, *down = &e->down;
    quantised x = {data, scale, row_bytes(gate->group, gate->rows)};
    quantised up_x = {up_data, scale, row_bytes(up->group, up->rows)};
    if (tokens <= FEW) {
        forms rows;
        rows.of[gate->group != 0] = x;
        rows.of[up->group != 0] = up_x;
        return few_experts(p, &rows, chosen, (int)tokens, &e, 1, shares, limit, total);
    }
    int64_t inner = gate->columns, stride = row_bytes(down->group, inner);
    size_t hidden_bytes = (size_t)round_up(tokens * inner * 4, 64), row_scale_bytes = (size_t)round_up(tokens * 4, 64);
    char *room = workspace(p, hidden_bytes + row_scale_bytes + (size_t)(tokens * stride));
    if (!room) return 1;
    float *hidden = (float *)room, *hidden_scale = (float *)(room + hidden_bytes);
    char *hidden_rows = room + hidden_bytes + row_scale_bytes;
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

// y[each] [hidden] = shares[each] * experts[each](x [hidden]), as kernel_expert adds it to zeros. Returns 0, or 1 where
// memory is wanting.
EXPORT int32_t kernel_experts(pool *p, const float *x, int64_t count, const expert *const *experts, const float *shares,
                              float limit, float *y) {
    if (!count) return 0;
    memset(y, 0, (size_t)(count * experts[0]->down.columns) * sizeof *y);
    forms rows;
    const matrix *taken[2] = {&experts[0]->gate, &experts[0]->up};
    int64_t only = 0;
    int failed = quantise_for(&rows, x, taken, 2) || few_experts(p, &rows, &only, 1, experts, count, shares, limit, y);
    free(rows.memory);
    return failed;
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
