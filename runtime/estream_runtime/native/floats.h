// What a layer computes in floats. FORMAT.md section 10.
#pragma once

#include <math.h>

#include "rows.h"

// As many floats as a register holds, at any address.
#if defined(__AVX512F__)
#define FLOATS 16
#elif defined(__AVX2__)
#define FLOATS 8
#else
#define FLOATS 4
#endif
typedef float floats __attribute__((vector_size(4 * FLOATS), aligned(4), may_alias));

// Rounds x / scale, which is at most some hundreds in size, half to even: adding and taking away 1.5 * 2^23 does.
INLINE void round_values(const float *x, float scale, int64_t count, int8_t *values) {
    const float magic = 12582912.0f;
    for (int64_t k = 0; k < count; k++) {
        float rounded = (x[k] / scale + magic) - magic;
        rounded = rounded > 127 ? 127 : rounded < -128 ? -128 : rounded;
        values[k] = (int8_t)rounded;
    }
}

// Largest |x|, or what is not finite if there is such.
INLINE float largest_of(const float *x, int64_t count) {
    float each[16] = {0}, odd[16] = {0};
    int64_t k = 0;
    for (; k + 16 <= count; k += 16)
        for (int lane = 0; lane < 16; lane++) {
            float size = fabsf(x[k + lane]);
            each[lane] = size > each[lane] ? size : each[lane];
            odd[lane] += size - size;
        }
    for (; k < count; k++) {
        float size = fabsf(x[k]);
        each[0] = size > each[0] ? size : each[0];
        odd[0] += size - size;
    }
    float largest = 0;
    for (int lane = 0; lane < 16; lane++) {
        largest = each[lane] > largest ? each[lane] : largest;
        odd[0] += lane ? odd[lane] : 0;
    }
    return largest + odd[0]; // x - x is 0 or not a number
}

// e^x to within 2 units in the last place; arguments are limited to [-87, 88], where f32 ends. Cody and Waite's
// reduction.
INLINE float exponential(float x) {
    const float magic = 12582912.0f;
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float shifted = x * 1.44269504f + magic, n = shifted - magic;
    float r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float e = 1.0f / 720;
    e = e * r + 1.0f / 120;
    e = e * r + 1.0f / 24;
    e = e * r + 1.0f / 6;
    e = e * r + 0.5f;
    e = e * r + 1.0f;
    e = e * r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (bits + 127) << 23; // the low bits of `shifted` are n
    float power;
    memcpy(&power, &bits, 4);
    return e * power;
}

INLINE float silu(float x) { return x / (1.0f + exponential(-x)); }

// `clamped-swiglu`: gate is held to at most `limit`, up to `limit` either way; what is no number stays so.
INLINE float clamped_swiglu(float gate, float up, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1.0f + exponential(-1.702f * gate)) * (up + 1.0f);
}

INLINE float mean_of(const float *x, int64_t count) {
    float each[16] = {0}, sum = 0;
    for (int64_t k = 0; k < count / 16 * 16; k += 16)
        for (int lane = 0; lane < 16; lane++) each[lane] += x[k + lane];
    for (int64_t k = count / 16 * 16; k < count; k++) each[0] += x[k];
    for (int lane = 0; lane < 16; lane++) sum += each[lane];
    return sum / (float)count;
}

// y = x * (1 / sqrt(mean(x * x) + epsilon)) * weight, of x less its mean and with a bias added where there is one
INLINE void norm_row(const float *x, const float *weight, const float *bias, float epsilon, int64_t count, float *y) {
    float squares[16] = {0}, sum = 0, mean = bias ? mean_of(x, count) : 0;
    for (int64_t k = 0; k < count / 16 * 16; k += 16)
        for (int lane = 0; lane < 16; lane++) squares[lane] += (x[k + lane] - mean) * (x[k + lane] - mean);
    for (int64_t k = count / 16 * 16; k < count; k++) squares[0] += (x[k] - mean) * (x[k] - mean);
    for (int lane = 0; lane < 16; lane++) sum += squares[lane];
    float factor = 1.0f / sqrtf(sum / (float)count + epsilon);
    for (int64_t k = 0; k < count; k++) y[k] = (x[k] - mean) * factor * weight[k];
    if (bias)
        for (int64_t k = 0; k < count; k++) y[k] += bias[k];
}

// Rotary encoding of one row: x * cos + (-x2, x1) * sin, x1 and x2 being the halves of x.
INLINE void rotate_row(const float *x, const float *cosine, const float *sine, int64_t width, float *y) {
    int64_t half = width / 2;
    for (int64_t k = 0; k < half; k++) y[k] = x[k] * cosine[k] - x[k + half] * sine[k];
    for (int64_t k = half; k < width; k++) y[k] = x[k] * cosine[k] + x[k - half] * sine[k];
}

// y [rows, columns] = a [rows, inner] @ b [inner, columns], or adds that to y; each sum in the order of `inner`.
INLINE void mix_part(const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t inner, int rows,
                     int vectors, float *y, int64_t y_stride, int adds) {
    floats sums[6][8], w[8];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++)
            sums[i][v] = adds ? *(const floats *)(y + i * y_stride + v * FLOATS) : (floats){0};
    for (int64_t k = 0; k < inner; k++) {
        for (int v = 0; v < vectors; v++) w[v] = *(const floats *)(b + k * b_stride + v * FLOATS);
        for (int i = 0; i < rows; i++) {
            float x = a[i * a_stride + k];
            for (int v = 0; v < vectors; v++) sums[i][v] += x * w[v];
        }
    }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++) *(floats *)(y + i * y_stride + v * FLOATS) = sums[i][v];
}

INLINE void mix_rows(const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t inner, int rows,
                     int64_t columns, float *y, int64_t y_stride, int adds) {
    int64_t n = 0;
    // A row alone waits for each sum, and reads memory in longer stretches, if there are many.
    for (; rows == 1 && n + 8 * FLOATS <= columns; n += 8 * FLOATS)
        mix_part(a, a_stride, b + n, b_stride, inner, rows, 8, y + n, y_stride, adds);
    for (; n + 2 * FLOATS <= columns; n += 2 * FLOATS)
        mix_part(a, a_stride, b + n, b_stride, inner, rows, 2, y + n, y_stride, adds);
    for (; n + FLOATS <= columns; n += FLOATS)
        mix_part(a, a_stride, b + n, b_stride, inner, rows, 1, y + n, y_stride, adds);
    for (; n < columns; n++)
        for (int i = 0; i < rows; i++) {
            float sum = adds ? y[i * y_stride + n] : 0;
            for (int64_t k = 0; k < inner; k++) sum += a[i * a_stride + k] * b[k * b_stride + n];
            y[i * y_stride + n] = sum;
        }
}

static void mix(const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t inner, int64_t rows,
                int64_t columns, float *y, int64_t y_stride, int adds) {
    for (; rows >= 6; rows -= 6, a += 6 * a_stride, y += 6 * y_stride)
        mix_rows(a, a_stride, b, b_stride, inner, 6, columns, y, y_stride, adds);
    for (; rows; rows--, a += a_stride, y += y_stride)
        mix_rows(a, a_stride, b, b_stride, inner, 1, columns, y, y_stride, adds);
}
