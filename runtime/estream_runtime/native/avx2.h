// Integer products with AVX2 alone. FORMAT.md annex A.
//
// `vpmaddubsw` adds two products in 16 bits and saturates, so it takes nibbles only: stored ones (0 to 15) times
// activations (-128 to 127) stay below 2^13, and 8 such sums, less what the zero point of 8 adds, below 2^15. Those are
// multiplied by the group's multiplier on the way to 32 bits. Bytes (`w8`) are widened to 16 bits first.
#pragma once

#include <immintrin.h>

#include "rows.h"

enum { WIDTH = 32, VECTORS = 4 }; // columns of a tile, in vectors of 8

// A block of a matrix, made ready: [BLOCK / 4][WIDTH] quadruples of nibbles, or [BLOCK / 2][WIDTH] pairs of int16.
typedef struct {
    __m256i weights[BLOCK / 2 * VECTORS];
    __m256i multipliers[BLOCK / STRIP * VECTORS]; // pairs of int16
} tile;

// What a quantised row holds: int8, then for each strip the corrections of even and odd pairs as two int16, for
// nibbles; int16 for bytes.
INLINE int64_t row_bytes(int32_t group, int64_t columns) {
    int64_t padded = round_up(columns, ROW_ALIGNMENT);
    return group ? padded + padded / STRIP * 4 : padded * 2;
}

// Puts the values from `at` on into a quantised row, as many as ROW_ALIGNMENT.
INLINE void store_values(char *row, int32_t group, int64_t padded, int64_t at, const int8_t *values) {
    if (!group) {
        for (int k = 0; k < ROW_ALIGNMENT; k++) ((int16_t *)row)[at + k] = values[k];
        return;
    }
    memcpy(row + at, values, ROW_ALIGNMENT);
    for (int first = 0; first < ROW_ALIGNMENT; first += STRIP) {
        int sums[2] = {0, 0};
        for (int k = 0; k < STRIP; k += 4) {
            sums[0] += values[first + k] + values[first + k + 1];
            sums[1] += values[first + k + 2] + values[first + k + 3];
        }
        int16_t corrections[2] = {(int16_t)(-NIBBLE_ZERO * sums[0]), (int16_t)(-NIBBLE_ZERO * sums[1])};
        memcpy(row + padded + (at + first) / STRIP * 4, corrections, 4);
    }
}

INLINE __m128i int8_values(const char *row, int64_t k) { return _mm_loadu_si128((const __m128i *)(row + k)); }
INLINE int32_t int16_pair(const char *row, int64_t k) { return load_32(row + k * 2); }

INLINE __m256i load(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }
INLINE __m256i low_nibbles(__m256i packed) { return _mm256_and_si256(packed, _mm256_set1_epi8(15)); }
INLINE __m256i high_nibbles(__m256i packed) { return low_nibbles(_mm256_srli_epi16(packed, 4)); }

// 32 columns of four rows, as 4 vectors of 8 columns with four rows each.
INLINE void interleave(__m256i a, __m256i b, __m256i c, __m256i d, __m256i out[4]) {
    __m256i ab = _mm256_unpacklo_epi8(a, b), cd = _mm256_unpacklo_epi8(c, d);
    __m256i first = _mm256_unpacklo_epi16(ab, cd), second = _mm256_unpackhi_epi16(ab, cd);
    ab = _mm256_unpackhi_epi8(a, b), cd = _mm256_unpackhi_epi8(c, d);
    __m256i third = _mm256_unpacklo_epi16(ab, cd), fourth = _mm256_unpackhi_epi16(ab, cd);
    out[0] = _mm256_permute2x128_si256(first, second, 0x20);
    out[1] = _mm256_permute2x128_si256(third, fourth, 0x20);
    out[2] = _mm256_permute2x128_si256(first, second, 0x31);
    out[3] = _mm256_permute2x128_si256(third, fourth, 0x31);
}

// `count` rows of nibbles, whole groups; `stride` bytes from one row of a part to the next.
static void fill_nibbles(tile *t, const uint8_t *packed, const int8_t *multipliers, int64_t stride, int64_t count,
                         int32_t group) {
    int half = group / 2;
    for (int64_t k = 0; k < count; k += group) {
        __m256i *out = t->weights + k;
        for (int row = 0; row < half; row += 4, out += 4) {
            const uint8_t *at = packed + (k / 2 + row) * stride;
            for (int each = 0; each < 4; each++) __builtin_prefetch(at + (AHEAD + each) * stride);
            __m256i a = load(at), b = load(at + stride), c = load(at + 2 * stride), d = load(at + 3 * stride);
            interleave(low_nibbles(a), low_nibbles(b), low_nibbles(c), low_nibbles(d), out);
            interleave(high_nibbles(a), high_nibbles(b), high_nibbles(c), high_nibbles(d), out + half);
        }
        for (int v = 0; v < VECTORS; v++) {
            const int8_t *at = multipliers + k / group * stride + v * 8;
            __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at));
            __m256i pair = _mm256_blend_epi16(wide, _mm256_slli_epi32(wide, 16), 0xaa);
            for (int strip = 0; strip < group / STRIP; strip++)
                t->multipliers[(k / STRIP + strip) * VECTORS + v] = pair;
        }
    }
}

// `count` rows of int8, a multiple of BYTE_ROWS.
static void fill_bytes(tile *t, const int8_t *weights, int64_t stride, int64_t count) {
    for (int64_t k = 0; k < count; k += 2)
        for (int v = 0; v < VECTORS; v++) {
            const int8_t *at = weights + k * stride + v * 8;
            __m128i even = _mm_loadl_epi64((const __m128i *)at), odd = _mm_loadl_epi64((const __m128i *)(at + stride));
            t->weights[k / 2 * VECTORS + v] = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(even, odd));
        }
}

// Adds to sums [tokens, 16] what `strips` strips of nibbles give.
INLINE void add_nibbles(const tile *t, int v, const char *const *rows, int64_t k, int64_t padded, int64_t strips,
                        int tokens, int32_t *const *sums) {
    for (int64_t strip = 0; strip < strips; strip++) {
        __m256i low[4], high[4];
        for (int i = 0; i < tokens; i++)
            low[i] = high[i] = _mm256_set1_epi32(load_32(rows[i] + padded + (k / STRIP + strip) * 4));
#pragma GCC unroll 8
        for (int step = 0; step < STRIP / 4; step++) {
            const __m256i *w = t->weights + (strip * (STRIP / 4) + step) * VECTORS + v;
            __m256i first = w[0], second = w[1];
            for (int i = 0; i < tokens; i++) {
                __m256i x = _mm256_set1_epi32(load_32(rows[i] + k + strip * STRIP + step * 4));
                low[i] = _mm256_add_epi16(low[i], _mm256_maddubs_epi16(first, x));
                high[i] = _mm256_add_epi16(high[i], _mm256_maddubs_epi16(second, x));
                // Or compilers make all products first, and keep them in memory.
                __asm__("" : "+x"(low[i]), "+x"(high[i]));
            }
        }
        const __m256i *m = t->multipliers + strip * VECTORS + v;
        for (int i = 0; i < tokens; i++) {
            __m256i *sum = (__m256i *)(sums[i] + v * 8);
            sum[0] = _mm256_add_epi32(sum[0], _mm256_madd_epi16(low[i], m[0]));
            sum[1] = _mm256_add_epi32(sum[1], _mm256_madd_epi16(high[i], m[1]));
        }
    }
}

// Adds to sums [tokens, 16] what `count` rows of int16 give.
INLINE void add_pairs(const tile *t, int v, const char *const *rows, int64_t k, int64_t count, int tokens,
                      int32_t *const *sums) {
    __m256i low[4], high[4];
    for (int i = 0; i < tokens; i++) {
        low[i] = load(sums[i] + v * 8);
        high[i] = load(sums[i] + v * 8 + 8);
    }
    for (int64_t pair = 0; pair < count / 2; pair++) {
        const __m256i *w = t->weights + pair * VECTORS + v;
        __m256i first = w[0], second = w[1];
        for (int i = 0; i < tokens; i++) {
            __m256i x = _mm256_set1_epi32(load_32(rows[i] + (k + pair * 2) * 2));
            low[i] = _mm256_add_epi32(low[i], _mm256_madd_epi16(first, x));
            high[i] = _mm256_add_epi32(high[i], _mm256_madd_epi16(second, x));
        }
    }
    for (int i = 0; i < tokens; i++) {
        _mm256_storeu_si256((__m256i *)(sums[i] + v * 8), low[i]);
        _mm256_storeu_si256((__m256i *)(sums[i] + v * 8 + 8), high[i]);
    }
}

INLINE void add_block(const tile *t, int32_t group, const char *const *rows, int64_t k, int64_t padded, int64_t count,
                      int tokens, int32_t *const *sums) {
    for (int v = 0; v < VECTORS; v += 2)
        if (group)
            add_nibbles(t, v, rows, k, padded, count / STRIP, tokens, sums);
        else
            add_pairs(t, v, rows, k, count, tokens, sums);
}

// Adds to sums [tokens, WIDTH] the products of rows with a tile that holds rows k to k + count of a matrix.
static void multiply(const tile *t, int32_t group, const char *const *rows, int64_t k, int64_t padded, int64_t count,
                     int64_t tokens, int32_t *sums) {
    for (int64_t at = 0; at < tokens; at += 4, rows += 4, sums += 4 * WIDTH) {
        int32_t *const each[4] = {sums, sums + WIDTH, sums + 2 * WIDTH, sums + 3 * WIDTH};
        switch (tokens - at) {
            case 1: add_block(t, group, rows, k, padded, count, 1, each); break;
            case 2: add_block(t, group, rows, k, padded, count, 2, each); break;
            case 3: add_block(t, group, rows, k, padded, count, 3, each); break;
            default: add_block(t, group, rows, k, padded, count, 4, each);
        }
    }
}

#include "few.h"
