// One or two token rows times a matrix as it is stored, with NEON: for so few nothing is made ready.
//
// Rows of bytes are interleaved in fours while they still hold two nibbles each, and multiplied by `sdot`, which is
// quicker on most processors than multiplying wide and has no sums that could overflow.
#pragma once

#define FEW 2 // most token rows

// Four rows of 16 columns, interleaved; memory is asked for those that are needed `soon` rows later.
INLINE void load_four(const void *from, int64_t stride, int64_t soon, int8x16_t out[4]) {
    const int8_t *at = from;
    for (int row = 0; row < 4; row++) __builtin_prefetch(at + (soon + row) * stride);
    int8x16_t a = load_values(at), b = load_values(at + stride);
    interleave(a, b, load_values(at + 2 * stride), load_values(at + 3 * stride), out);
}

// Four values of a quantised row, for all columns alike.
INLINE int8x16_t four_values(const char *from) { return vreinterpretq_s8_s32(vdupq_n_s32(load_32(from))); }

// Adds to sums [tokens, pitch], 16 columns, what a group of nibbles gives; corrections [tokens] are what its zero
// point adds. `rows` point to the group's first activation.
INLINE void few_nibbles(const uint8_t *packed, const int8_t *multipliers, int64_t stride, int half, int tokens,
                        const char *const *rows, const int32_t *corrections, int32_t *sums, int64_t pitch) {
    int32x4_t part[FEW][4];
    for (int i = 0; i < tokens; i++)
        for (int v = 0; v < 4; v++) part[i][v] = vdupq_n_s32(corrections[i]);
    for (int row = 0; row < half; row += 4) {
        int8x16_t bytes[4];
        load_four(packed + row * stride, stride, half, bytes);
        for (int i = 0; i < tokens; i++) {
            int8x16_t low = four_values(rows[i] + row), high = four_values(rows[i] + half + row);
            for (int v = 0; v < 4; v++) {
                part[i][v] = vdotq_s32(part[i][v], low_nibbles(bytes[v]), low);
                part[i][v] = vdotq_s32(part[i][v], high_nibbles(bytes[v]), high);
            }
        }
    }
    int8x16_t once = load_values(multipliers);
    int16x8_t left = vmovl_s8(vget_low_s8(once)), right = vmovl_s8(vget_high_s8(once));
    int32x4_t m[4] = {vmovl_s16(vget_low_s16(left)), vmovl_s16(vget_high_s16(left)), vmovl_s16(vget_low_s16(right)),
                      vmovl_s16(vget_high_s16(right))};
    for (int i = 0; i < tokens; i++)
        for (int v = 0; v < 4; v++) {
            int32_t *sum = sums + i * pitch + v * 4;
            vst1q_s32(sum, vmlaq_s32(vld1q_s32(sum), part[i][v], m[v]));
        }
}

// The same for BYTE_ROWS rows of int8; rows so many further on are needed soon.
INLINE void few_bytes(const int8_t *weights, int64_t stride, int64_t soon, int tokens, const char *const *rows,
                      int32_t *sums, int64_t pitch) {
    int32x4_t each[FEW][4];
    for (int i = 0; i < tokens; i++)
        for (int v = 0; v < 4; v++) each[i][v] = vld1q_s32(sums + i * pitch + v * 4);
    for (int row = 0; row < BYTE_ROWS; row += 4) {
        int8x16_t four[4];
        load_four(weights + row * stride, stride, soon, four);
        for (int i = 0; i < tokens; i++) {
            int8x16_t x = four_values(rows[i] + row);
            for (int v = 0; v < 4; v++) each[i][v] = vdotq_s32(each[i][v], four[v], x);
        }
    }
    for (int i = 0; i < tokens; i++)
        for (int v = 0; v < 4; v++) vst1q_s32(sums + i * pitch + v * 4, each[i][v]);
}

// What the zero point of nibbles adds to the products of `group` values.
INLINE int32_t correction_of(const char *row, int32_t group) {
    int32_t sum = 0;
    for (int at = 0; at < group; at += 16) sum += vaddlvq_s8(load_values(row + at));
    return -NIBBLE_ZERO * sum;
}

// Products of `tokens` rows (1 or 2) with rows `from` to `to` of a matrix, whole blocks unless it ends there, and
// `width` columns from `column` on, whole vectors of 32: sums [tokens, pitch].
INLINE void few_columns(const matrix *m, const char *const *rows, int tokens, int64_t from, int64_t to, int64_t column,
                        int64_t width, int32_t *sums, int64_t pitch) {
    int64_t stride = m->columns, step = m->group ? m->group : BYTE_ROWS;
    for (int i = 0; i < tokens; i++) memset(sums + i * pitch, 0, (size_t)width * sizeof *sums);
    // Some rows of all columns, then the next: memory is read in stretches as long as a task is wide.
    for (int64_t k = from; k < to; k += step) {
        const char *x[FEW];
        int32_t corrections[FEW] = {0};
        for (int i = 0; i < tokens; i++) {
            x[i] = rows[i] + k;
            if (m->group) corrections[i] = correction_of(x[i], m->group);
        }
        for (int64_t at = 0; at < width; at += 16) {
            if (m->group) {
                const uint8_t *packed = m->weights + k / 2 * stride + column + at;
                const int8_t *multipliers = m->multipliers + k / m->group * stride + column + at;
                few_nibbles(packed, multipliers, stride, m->group / 2, tokens, x, corrections, sums + at, pitch);
                continue;
            }
            const int8_t *weights = (const int8_t *)m->weights + k * stride + column + at;
            int8_t last[BYTE_ROWS][16] = {0};
            if (to - k >= BYTE_ROWS) {
                few_bytes(weights, stride, AHEAD, tokens, x, sums + at, pitch);
            } else {
                for (int64_t row = 0; row < to - k; row++) memcpy(last[row], weights + row * stride, 16);
                few_bytes(last[0], 16, 0, tokens, x, sums + at, pitch);
            }
        }
    }
}
