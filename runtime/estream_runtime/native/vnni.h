// Integer products with `vpdpbusd`, which sums four products of unsigned and signed bytes in 32 bits, exactly: in
// vectors of 64 bytes (AVX512-VNNI) or 32 (AVX-VNNI). FORMAT.md annex A.
#pragma once

#include <immintrin.h>

#include "rows.h"

#ifdef PATH_AVX512VNNI
typedef __m512i vector;
// Columns of a vector; token rows and vectors that are multiplied at a time, as many as registers hold.
#define LANES 16
#define HEIGHT 6
#define BREADTH 4
#define OF(name) _mm512_##name
#define BITS(name) _mm512_##name##_si512
#define load_vector(from) _mm512_loadu_si512(from)
#define store_vector(to, v) _mm512_storeu_si512(to, v)
#define dot(sum, x, w) _mm512_dpbusd_epi32(sum, x, w)
#else
typedef __m256i vector;
#define LANES 8
#define HEIGHT 4
#define BREADTH 2
#define OF(name) _mm256_##name
#define BITS(name) _mm256_##name##_si256
#define load_vector(from) _mm256_loadu_si256((const __m256i *)(from))
#define store_vector(to, v) _mm256_storeu_si256((__m256i *)(to), v)
#define dot(sum, x, w) _mm256_dpbusd_avx_epi32(sum, x, w)
#endif
#define zero() BITS(setzero)()
#define and(a, b) BITS (and)(a, b)
#define or(a, b) BITS(or)(a, b)
#define splat_8(value) OF(set1_epi8)(value)
#define splat_16(value) OF(set1_epi16)(value)
#define splat_32(value) OF(set1_epi32)(value)
#define shift_left(a, bits) OF(slli_epi16)(a, bits)
#define shift_right(a, bits) OF(srli_epi16)(a, bits)
#define multiply_16(a, b) OF(mullo_epi16)(a, b)
#define subtract_8(a, b) OF(sub_epi8)(a, b)
#define subtract_32(a, b) OF(sub_epi32)(a, b)

enum { VECTORS = 4, WIDTH = VECTORS * LANES }; // columns of a tile

// A block of a matrix, made ready: [BLOCK / 4][WIDTH] quadruples of the int8 weights it stands for, and 128 times the
// sum of each column, by which sums are too large since 128 stands for 0.
typedef struct {
    vector weights[BLOCK / 4 * VECTORS];
    vector excess[VECTORS];
} tile;

// What a quantised row holds: uint8, 128 standing for 0.
INLINE int64_t row_bytes(int32_t group, int64_t columns) {
    (void)group;
    return round_up(columns, ROW_ALIGNMENT);
}

// Puts the values from `at` on into a quantised row, as many as ROW_ALIGNMENT.
INLINE void store_values(char *row, int32_t group, int64_t padded, int64_t at, const int8_t *values) {
    (void)group, (void)padded;
    for (int k = 0; k < ROW_ALIGNMENT; k++) row[at + k] = (char)(values[k] ^ -128);
}

INLINE __m128i int8_values(const char *row, int64_t k) {
    return _mm_xor_si128(_mm_loadu_si128((const __m128i *)(row + k)), _mm_set1_epi8(-128));
}

INLINE int32_t int16_pair(const char *row, int64_t k) {
    return (int32_t)((uint32_t)((uint8_t)row[k] - 128) & 65535u) |
           (int32_t)((uint32_t)((uint8_t)row[k + 1] - 128) << 16);
}

INLINE __m256i load(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }
INLINE __m256i low_nibbles(__m256i packed) { return _mm256_and_si256(packed, _mm256_set1_epi8(15)); }
INLINE __m256i high_nibbles(__m256i packed) { return low_nibbles(_mm256_srli_epi16(packed, 4)); }

// WIDTH columns of four rows, as vectors of LANES columns with four rows each, in the order of columns.
INLINE void interleave(vector a, vector b, vector c, vector d, vector out[VECTORS]) {
    vector ab = OF(unpacklo_epi8)(a, b), cd = OF(unpacklo_epi8)(c, d);
    vector first = OF(unpacklo_epi16)(ab, cd), second = OF(unpackhi_epi16)(ab, cd);
    ab = OF(unpackhi_epi8)(a, b), cd = OF(unpackhi_epi8)(c, d);
    vector third = OF(unpacklo_epi16)(ab, cd), fourth = OF(unpackhi_epi16)(ab, cd);
#ifdef PATH_AVX512VNNI
    // Each holds a quarter of what each result takes: 4 columns in each lane of 128 bits.
    vector low = _mm512_shuffle_i32x4(first, second, 0x44), high = _mm512_shuffle_i32x4(third, fourth, 0x44);
    out[0] = _mm512_shuffle_i32x4(low, high, 0x88);
    out[1] = _mm512_shuffle_i32x4(low, high, 0xdd);
    low = _mm512_shuffle_i32x4(first, second, 0xee), high = _mm512_shuffle_i32x4(third, fourth, 0xee);
    out[2] = _mm512_shuffle_i32x4(low, high, 0x88);
    out[3] = _mm512_shuffle_i32x4(low, high, 0xdd);
#else
    out[0] = _mm256_permute2x128_si256(first, second, 0x20);
    out[1] = _mm256_permute2x128_si256(third, fourth, 0x20);
    out[2] = _mm256_permute2x128_si256(first, second, 0x31);
    out[3] = _mm256_permute2x128_si256(third, fourth, 0x31);
#endif
}

// WIDTH columns of four rows, as VECTORS vectors of LANES columns with four rows each, which are counted into the
// excess.
INLINE void arrange(tile *t, int64_t step, vector a, vector b, vector c, vector d) {
    vector out[VECTORS];
    interleave(a, b, c, d, out);
    for (int v = 0; v < VECTORS; v++) {
        t->weights[step * VECTORS + v] = out[v];
        t->excess[v] = dot(t->excess[v], splat_8(-128), out[v]);
    }
}

// Stored nibbles less 8, times multipliers: bytes, whose products need no more than their own 8 bits.
INLINE vector weights_of(vector nibbles, vector multipliers, vector odd_multipliers, vector offsets) {
    vector even = and(multiply_16(nibbles, multipliers), splat_16(255));
    vector odd = multiply_16(and(nibbles, splat_16(-256)), odd_multipliers);
    return subtract_8(or (even, odd), offsets);
}

static void fill_nibbles(tile *t, const uint8_t *packed, const int8_t *multipliers, int64_t stride, int64_t count,
                         int32_t group) {
    int half = group / 2;
    for (int v = 0; v < VECTORS; v++) t->excess[v] = zero();
    for (int64_t k = 0; k < count; k += group) {
        vector m = load_vector(multipliers + k / group * stride);
        vector odd = shift_right(m, 8), offsets = and(shift_left(m, 3), splat_8(-NIBBLE_ZERO));
        for (int row = 0; row < half; row += 4) {
            vector low[4], high[4];
            for (int each = 0; each < 4; each++) {
                vector bytes = load_vector(packed + (k / 2 + row + each) * stride);
                vector lows = and(bytes, splat_8(15)), highs = and(shift_right(bytes, 4), splat_8(15));
                low[each] = weights_of(lows, m, odd, offsets);
                high[each] = weights_of(highs, m, odd, offsets);
            }
            arrange(t, (k + row) / 4, low[0], low[1], low[2], low[3]);
            arrange(t, (k + row + half) / 4, high[0], high[1], high[2], high[3]);
        }
    }
}

// `count` rows of int8, a multiple of BYTE_ROWS.
static void fill_bytes(tile *t, const int8_t *weights, int64_t stride, int64_t count) {
    for (int v = 0; v < VECTORS; v++) t->excess[v] = zero();
    for (int64_t k = 0; k < count; k += 4) {
        const int8_t *at = weights + k * stride;
        arrange(t, k / 4, load_vector(at), load_vector(at + stride), load_vector(at + 2 * stride),
                load_vector(at + 3 * stride));
    }
}

// Adds to sums [tokens, WIDTH] the products of `tokens` rows with `vectors` vectors of a tile, from `v` on.
INLINE void add_block(const tile *t, int v, int vectors, const char *const *rows, int64_t k, int64_t count, int tokens,
                      int32_t *sums) {
    vector each[HEIGHT][VECTORS];
    for (int i = 0; i < tokens; i++)
        for (int n = 0; n < vectors; n++)
            each[i][n] = subtract_32(load_vector(sums + i * WIDTH + (v + n) * LANES), t->excess[v + n]);
    for (int64_t step = 0; step < count / 4; step++)
        for (int i = 0; i < tokens; i++) {
            vector x = splat_32(load_32(rows[i] + k + step * 4));
            for (int n = 0; n < vectors; n++) each[i][n] = dot(each[i][n], x, t->weights[step * VECTORS + v + n]);
        }
    for (int i = 0; i < tokens; i++)
        for (int n = 0; n < vectors; n++) store_vector(sums + i * WIDTH + (v + n) * LANES, each[i][n]);
}

INLINE void add_rows(const tile *t, const char *const *rows, int64_t k, int64_t count, int tokens, int32_t *sums) {
    for (int v = 0; v < VECTORS; v += BREADTH) add_block(t, v, BREADTH, rows, k, count, tokens, sums);
}

static void multiply(const tile *t, int32_t group, const char *const *rows, int64_t k, int64_t padded, int64_t count,
                     int64_t tokens, int32_t *sums) {
    (void)group, (void)padded;
    for (int64_t at = 0; at < tokens; at += HEIGHT, rows += HEIGHT, sums += HEIGHT * WIDTH) switch (tokens - at) {
            case 1: add_rows(t, rows, k, count, 1, sums); break;
            case 2: add_rows(t, rows, k, count, 2, sums); break;
            case 3: add_rows(t, rows, k, count, 3, sums); break;
#if HEIGHT > 4
            case 4: add_rows(t, rows, k, count, 4, sums); break;
            case 5: add_rows(t, rows, k, count, 5, sums); break;
#endif
            default: add_rows(t, rows, k, count, HEIGHT, sums);
        }
}

#include "few.h"
