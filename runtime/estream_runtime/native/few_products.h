// Products of one or two token rows with several matrices, as one set of tasks.
//
// A task is a part of a product: a stretch of a matrix's rows, and where it is wide a strip of its columns, so that
// memory is read in long stretches. What parts give are integers, whose sum is the same in whatever order and parts.
// What belongs together is a step: who does the last part of a step finishes it, and what follows may begin, so that
// threads meet once in a call and not once in a step.
#pragma once

#include "products.h"

enum {
    FEW_WIDTH = 4096,     // most columns of a part
    PART_BYTES = 1 << 19, // bytes that a part has at least, if there are two for each thread,
    SHARES = 16,          // and at most where there are more than so many for each
    STRETCH = 256,        // columns that are finished at a time
    MATRICES = 3          // most matrices that are multiplied together
};

typedef struct {
    const matrix *m;
    const char *rows[FEW];   // quantised, as the matrix takes them
    const float *scale[FEW]; // one each
    int64_t width, depth;    // columns and rows of a part
    int64_t strips, pieces;  // parts beside and below each other
    int32_t *sums;           // [pieces, tokens, columns]
} few_product;

// What belongs together: a product, whose rows or shares of them are wanted; or gate and up, and what the activation
// makes of them, quantised.
typedef struct step {
    few_product products[2];
    int count;                 // of products
    const struct step *before; // has to be finished before, or NULL
    float *y[FEW];
    const float *shares; // [tokens], if shares of the products are added to y
    int activates;
    float limit;
    int32_t group; // of the matrix that takes what the activation gives
    char *next[FEW];
    float *next_scale[FEW];
    int64_t first, parts; // its tasks
    atomic_llong left;    // parts that are not done
    atomic_int finished;
} step;

typedef struct {
    const pool *pool;
    int tokens;
    step *steps;
} few_call;

INLINE int64_t matrix_bytes(const matrix *m) { return stored_rows(m) * m->columns / (m->group ? 2 : 1); }

// Bytes of a part, of so many for all threads: long stretches, and yet no thread waits long for the last ones.
INLINE int64_t part_bytes(const pool *p, int64_t all) {
    int64_t few = all / (p->threads * SHARES), many = least(PART_BYTES, all / (p->threads * 2));
    return few > many ? few : many + 1;
}

// Says in what parts the product is made; gives how many sums there will be.
static int64_t divide(few_product *product, int64_t bytes, int tokens) {
    const matrix *m = product->m;
    product->width = least(FEW_WIDTH, m->columns);
    product->strips = parts(m->columns, product->width);
    int64_t pieces = matrix_bytes(m) / product->strips / bytes;
    product->depth = round_up(parts(stored_rows(m), pieces ? pieces : 1), BLOCK);
    product->pieces = parts(stored_rows(m), product->depth);
    return product->pieces * tokens * m->columns;
}

static void sum_part(scratch *s, const few_product *product, int tokens, int64_t number) {
    const matrix *m = product->m;
    int64_t piece = number % product->pieces, n = number / product->pieces * product->width;
    int64_t from = piece * product->depth, to = least(from + product->depth, stored_rows(m));
    int64_t width = least(product->width, m->columns - n), whole = width / 32 * 32;
    int32_t *sums = product->sums + piece * tokens * m->columns + n;
    if (tokens == 1)
        few_columns(m, product->rows, 1, from, to, n, whole, sums, m->columns);
    else
        few_columns(m, product->rows, 2, from, to, n, whole, sums, m->columns);
    if (whole == width) return;
    sum_tiles(s, m, product->rows, tokens, from, to, n + whole);
    for (int i = 0; i < tokens; i++)
        memcpy(sums + i * m->columns + whole, s->sums + i * WIDTH, (size_t)(width - whole) * sizeof *sums);
}

// Products of row i with at most STRETCH columns from n on.
static void finish_row(const few_product *product, int tokens, int i, int64_t n, int64_t columns, float *y) {
    int64_t pitch = product->m->columns;
    int32_t sums[STRETCH] = {0};
    for (int64_t piece = 0; piece < product->pieces; piece++) {
        const int32_t *more = product->sums + (piece * tokens + i) * pitch + n;
        for (int64_t each = 0; each < columns; each++) sums[each] += more[each];
    }
    scale_row(sums, *product->scale[i], product->m, n, columns, y);
}

static void finish(const step *s, int tokens) {
    int64_t all = s->products[0].m->columns;
    for (int i = 0; i < tokens; i++) {
        for (int64_t n = 0; n < all; n += STRETCH) {
            int64_t columns = least(STRETCH, all - n);
            float row[STRETCH], *y = s->y[i] + n;
            finish_row(s->products, tokens, i, n, columns, s->shares ? row : y);
            if (s->shares) add_share(s->shares[i], row, columns, y);
            if (!s->activates) continue;
            finish_row(s->products + 1, tokens, i, n, columns, row);
            activate(y, row, s->limit, columns);
        }
        if (s->activates) quantise_row(s->y[i], all, s->group, s->next[i], s->next_scale[i]);
    }
}

// Task: a part. Steps come in the order of tasks, so what a part waits for is being done by others.
static void do_part(const void *call, int64_t number, int thread) {
    const few_call *c = call;
    step *s = c->steps;
    while (number >= s->first + s->parts) s++;
    for (int spin = 0; s->before && !atomic_load(&s->before->finished);) wait_a_little(&spin);
    const few_product *product = s->products;
    for (number -= s->first; number >= product->strips * product->pieces; product++)
        number -= product->strips * product->pieces;
    sum_part(scratch_of(c->pool, thread), product, c->tokens, number);
    if (atomic_fetch_sub(&s->left, 1) > 1) return;
    finish(s, c->tokens);
    atomic_store(&s->finished, 1);
}

// Carries out steps, each after what it waits for, whose products were divided and have room for their sums.
static void run_steps(pool *p, step *steps, int64_t count, int tokens) {
    int64_t tasks = 0;
    for (step *s = steps; s < steps + count; s++) {
        s->first = tasks;
        s->parts = 0;
        for (int i = 0; i < s->count; i++) s->parts += s->products[i].strips * s->products[i].pieces;
        tasks += s->parts;
        atomic_init(&s->left, s->parts);
        atomic_init(&s->finished, 0);
    }
    run_tasks(p, do_part, &(few_call){p, tokens, steps}, tasks);
}

// Token rows in the forms that matrices take: of int8 weights, of nibbles.
typedef struct {
    quantised of[2];
    float scale; // of one row
    void *memory;
} forms;

INLINE const quantised *form_for(const forms *x, const matrix *m) { return &x->of[m->group != 0]; }

// Quantises one row for all of some matrices. Returns 0, or 1 where memory is wanting; `memory` is to be freed.
static int quantise_for(forms *x, const float *row, const matrix *const *matrices, int64_t count) {
    int64_t columns = matrices[0]->rows, bytes[2] = {0, 0};
    for (int64_t i = 0; i < count; i++)
        bytes[matrices[i]->group != 0] = round_up(row_bytes(matrices[i]->group, columns), ROW_ALIGNMENT);
    char *at = x->memory = malloc((size_t)(bytes[0] + bytes[1]));
    if (!at) return 1;
    for (int form = 0; form < 2; at += bytes[form++]) {
        x->of[form] = (quantised){at, &x->scale, 0};
        if (bytes[form]) quantise_row(row, columns, form ? STRIP : 0, at, &x->scale);
    }
    return 0;
}

// Says which rows a product is of: `chosen` ones, or all in order.
static void take_rows(few_product *product, const forms *x, const int64_t *chosen, int tokens) {
    const quantised *form = form_for(x, product->m);
    for (int i = 0; i < tokens; i++) {
        product->rows[i] = form->data + row_of(chosen, i) * form->stride;
        product->scale[i] = form->scale + row_of(chosen, i);
    }
}

// y = x @ matrices, [tokens, N] of each, one after the other. Returns 0, or 1 where memory is wanting.
static int multiply_few(pool *p, const forms *x, int tokens, const matrix *const *matrices, int64_t count, float *y) {
    step steps[MATRICES];
    int64_t all = 0, sums = 0;
    for (int64_t each = 0; each < count; each++) all += matrix_bytes(matrices[each]);
    for (int64_t each = 0; each < count; each++) {
        step *s = steps + each;
        *s = (step){.products = {{.m = matrices[each]}}, .count = 1};
        take_rows(s->products, x, NULL, tokens);
        for (int i = 0; i < tokens; i++, y += matrices[each]->columns) s->y[i] = y;
        sums += divide(s->products, part_bytes(p, all), tokens);
    }
    int32_t *room = workspace(p, (size_t)sums * sizeof *room);
    if (room) {
        for (int64_t each = 0; each < count; each++) {
            steps[each].products->sums = room;
            room += steps[each].products->pieces * tokens * matrices[each]->columns;
        }
        run_steps(p, steps, count, tokens);
    }
    return !room;
}

typedef struct {
    matrix gate, up, down;
} expert;

// y[chosen] += shares * experts[0](x[chosen]), or of one row y[each] += shares[each] * experts[each](x). Returns 0, or
// 1 where memory is wanting.
static int few_experts(pool *p, const forms *x, const int64_t *chosen, int tokens, const expert *const *experts,
                       int64_t count, const float *shares, float limit, float *y) {
    step *steps = calloc((size_t)(2 * count), sizeof *steps);
    if (!steps) return 1;
    int64_t all = 0, room = 0;
    for (int64_t each = 0; each < count; each++) {
        const expert *e = experts[each];
        all += matrix_bytes(&e->gate) + matrix_bytes(&e->up) + matrix_bytes(&e->down);
    }
    for (int64_t each = 0; each < count; each++) {
        const expert *e = experts[each];
        step *first = steps + each, *last = steps + count + each;
        int64_t bytes = part_bytes(p, all), inner = e->gate.columns;
        *first = (step){.products = {{.m = &e->gate}, {.m = &e->up}}, .count = 2, .activates = 1, .limit = limit};
        *last = (step){.products = {{.m = &e->down}}, .count = 1, .before = first, .shares = shares + each};
        first->group = e->down.group;
        for (int i = 0; i < 2; i++) {
            take_rows(first->products + i, x, chosen, tokens);
            room += round_up(4 * divide(first->products + i, bytes, tokens), 64);
        }
        room += round_up(4 * divide(last->products, bytes, tokens), 64);
        room += tokens * (round_up(4 * inner, 64) + round_up(row_bytes(first->group, inner), 64) + 64);
    }
    char *at = workspace(p, (size_t)room);
    for (int64_t each = 0; at && each < count; each++) {
        step *first = steps + each, *last = steps + count + each;
        int64_t inner = first->products->m->columns, hidden = last->products->m->columns;
        few_product *own[3] = {first->products, first->products + 1, last->products};
        for (int i = 0; i < 3; i++) {
            own[i]->sums = (int32_t *)at;
            at += round_up(4 * own[i]->pieces * tokens * own[i]->m->columns, 64);
        }
        for (int i = 0; i < tokens; i++) {
            first->y[i] = (float *)at;
            at += round_up(4 * inner, 64);
            last->products->rows[i] = first->next[i] = at;
            at += round_up(row_bytes(first->group, inner), 64);
            last->products->scale[i] = first->next_scale[i] = (float *)at;
            at += 64;
            last->y[i] = y + (each + chosen[i]) * hidden;
        }
    }
    if (at) run_steps(p, steps, 2 * count, tokens);
    free(steps);
    return !at;
}
