// What a layer computes in floats. FORMAT.md section 10.
#pragma once

#include <math.h>

#include "rows.h"

typedef struct { int unused; } float_scratch;

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

// e^x to within 2 units in the last place; tends to 0 and to infinity where f32 ends. Cody and Waite's reduction.
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
