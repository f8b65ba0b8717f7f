// Rows of queries attend to keys and values, a block of keys after the other, so that scores need little memory: the
// running maximum and sum of Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
#pragma once

#include <float.h>

#include "floats.h"
#include "pool.h"

enum { QUERIES = 64, KEYS = 128, TOGETHER = 16 }; // rows of a task, keys of a block, keys summed side by side

typedef struct {
    pool *pool;
    const float *queries; // [heads, tokens, width]
    const float *keys;    // [shared, ..., width], `key_stride` floats from one to the next of `shared`
    const float *values;  // [shared, ..., value_width], likewise
    const float *mask;    // [tokens, length], added to scores
    const float *sinks;   // [heads], scores that have no value, or NULL
    float *y;             // [tokens, heads * value_width]
    int64_t heads, shared, tokens, length, width, value_width, key_stride, value_stride;
    float scale;
    char *room; // attention_bytes for each thread
} attending;

// What one thread works with.
typedef struct {
    float scores[QUERIES][KEYS];
    float largest[QUERIES], sum[QUERIES];
    float rest[]; // keys, turned: [width, KEYS]; then the result [QUERIES, value_width]
} attention_scratch;

INLINE size_t attention_bytes(int64_t width, int64_t value_width) {
    size_t rest = (size_t)(width * KEYS + value_width * QUERIES) * sizeof(float);
    return (size_t)round_up((int64_t)(sizeof(attention_scratch) + rest), 64);
}

// Scores of few rows: one product after the other, as turning the keys would cost more.
INLINE void score_few(const float *queries, int64_t rows, const float *keys, int64_t count, int64_t width,
                      float (*scores)[KEYS]) {
    for (int64_t key = 0; key < count; key++)
        for (int64_t i = 0; i < rows; i++) {
            const float *q = queries + i * width, *at = keys + key * width;
            float sums[32] = {0}, sum = 0;
            int64_t k = 0;
            for (; k + 32 <= width; k += 32)
                for (int lane = 0; lane < 32; lane++) sums[lane] += q[k + lane] * at[k + lane];
            for (; k < width; k++) sums[0] += q[k] * at[k];
            for (int lane = 0; lane < 16; lane++) sums[lane] += sums[lane + 16];
            for (int lane = 0; lane < 8; lane++) sums[lane] += sums[lane + 8];
            for (int lane = 0; lane < 8; lane++) sum += sums[lane];
            scores[i][key] = sum;
        }
}

// Makes shares of one row's scores, and of what was summed before what it is worth beside them.
INLINE void share_row(float *scores, const float *mask, float scale, int64_t count, float *largest, float *sum,
                      float *result, int64_t width) {
    float top[16], total[16] = {0}, most = *largest;
    for (int lane = 0; lane < 16; lane++) top[lane] = most;
    for (int64_t k = 0; k < count; k++) scores[k] = scores[k] * scale + mask[k];
    int64_t k = 0;
    for (; k + 16 <= count; k += 16)
        for (int lane = 0; lane < 16; lane++) top[lane] = scores[k + lane] > top[lane] ? scores[k + lane] : top[lane];
    for (; k < count; k++) top[0] = scores[k] > top[0] ? scores[k] : top[0];
    for (int lane = 0; lane < 16; lane++) most = top[lane] > most ? top[lane] : most;
    for (k = 0; k < count; k++) scores[k] = scores[k] - most < -87.0f ? 0 : exponential(scores[k] - most);
    for (k = 0; k + 16 <= count; k += 16)
        for (int lane = 0; lane < 16; lane++) total[lane] += scores[k + lane];
    for (; k < count; k++) total[0] += scores[k];
    float kept = *largest - most < -87.0f ? 0 : exponential(*largest - most), added = 0;
    for (int lane = 0; lane < 16; lane++) added += total[lane];
    *sum = *sum * kept + added;
    *largest = most;
    if (kept != 1)
        for (k = 0; k < width; k++) result[k] *= kept;
}

// Keys up to the last that any of the rows sees, and so many more that what is summed together stays so.
INLINE int64_t seen_keys(const float *mask, int64_t rows, int64_t length) {
    int64_t seen = length;
    for (int none = 1; none && seen; seen -= none)
        for (int64_t i = 0; none && i < rows; i++) none = mask[i * length + seen - 1] <= -FLT_MAX;
    return least(round_up(seen, TOGETHER), length);
}

// Task: at most QUERIES rows of a head.
static void attend_rows(const void *call, int64_t number, int thread) {
    const attending *c = call;
    int64_t width = c->width, value_width = c->value_width, blocks = parts(c->tokens, QUERIES);
    attention_scratch *s = (attention_scratch *)(c->room + attention_bytes(width, value_width) * (size_t)thread);
    int64_t head = number / blocks, from = number % blocks * QUERIES, rows = least(QUERIES, c->tokens - from);
    const float *queries = c->queries + (head * c->tokens + from) * width;
    const float *keys = c->keys + head / (c->heads / c->shared) * c->key_stride;
    const float *values = c->values + head / (c->heads / c->shared) * c->value_stride;
    int64_t length = seen_keys(c->mask + from * c->length, rows, c->length);
    float *turned = s->rest, *result = s->rest + width * KEYS;
    // A sink is the first score that is summed, and adds nothing to the result.
    for (int64_t i = 0; i < rows; i++) {
        s->largest[i] = c->sinks ? c->sinks[head] : -INFINITY;
        s->sum[i] = c->sinks ? 1 : 0;
    }
    memset(result, 0, (size_t)(rows * value_width) * sizeof *result);
    for (int64_t at = 0; at < length; at += KEYS) {
        int64_t count = least(KEYS, length - at);
        if (rows < 6) {
            score_few(queries, rows, keys + at * width, count, width, s->scores);
        } else {
            for (int64_t key = 0; key < count; key++)
                for (int64_t k = 0; k < width; k++) turned[k * KEYS + key] = keys[(at + key) * width + k];
            mix(queries, width, turned, KEYS, width, rows, count, s->scores[0], KEYS, 0);
        }
        for (int64_t i = 0; i < rows; i++)
            share_row(s->scores[i], c->mask + (from + i) * c->length + at, c->scale, count, &s->largest[i], &s->sum[i],
                      result + i * value_width, value_width);
        mix(s->scores[0], KEYS, values + at * value_width, value_width, count, rows, value_width, result, value_width,
            1);
    }
    for (int64_t i = 0; i < rows; i++) {
        float *y = c->y + ((from + i) * c->heads + head) * value_width, factor = 1.0f / s->sum[i];
        for (int64_t k = 0; k < value_width; k++) y[k] = result[i * value_width + k] * factor;
    }
}
