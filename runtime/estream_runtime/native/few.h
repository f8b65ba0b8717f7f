// One or two token rows times a matrix as it is stored, with AVX2: for so few nothing is made ready.
//
// Rows of bytes are interleaved in pairs, so that their nibbles are what `vpmaddubsw` takes against pairs of
// activations. Eight such sums less what the zero point adds stay below 2^15. So few products take less time than
// memory does, which is asked for in the order in which it lies, as many rows ahead as are multiplied at a time.
#pragma once

#define FEW 2 // most token rows

// What a block of quantised rows is to the products below, made ready: pairs of activations, two int8 twice over, or
// for int8 weights two int16; and corrections for each 16 activations, an int16 twice over.
typedef struct {
    int32_t pairs[FEW][BLOCK / 2], corrections[FEW][BLOCK / 16];
} few_rows;

// Where memory is asked for next: goes through rows of a strip of columns.
typedef struct {
    const uint8_t *row;
    int64_t stride, width, column;
} ahead;

INLINE void ask(ahead *next) {
    __builtin_prefetch(next->row + next->column);
    next->column += 64;
    if (next->column >= next->width) next->column = 0, next->row += next->stride;
}

INLINE void add_to(int32_t *sums, __m256i more) {
    _mm256_storeu_si256((__m256i *)sums, _mm256_add_epi32(load(sums), more));
}

// Adds to sums [tokens, pitch] what FEW_ROWS rows of bytes of one group give in `vectors` times 32 columns: of each 32,
// columns 0-3 and 16-19 come first, then 4-7 and 20-23, and so on. `low` and `high` say which activations of the block
// nibbles meet.
INLINE void few_nibbles(const uint8_t *packed, const int8_t *multipliers, int64_t stride, int tokens, int vectors,
                        const few_rows *f, int64_t low, int64_t high, ahead *next, int32_t *sums, int64_t pitch) {
    __m256i part[FEW][2][2][2]; // by vector, half of it, and nibble
    for (int i = 0; i < tokens; i++) {
        __m256i first = _mm256_set1_epi32(f->corrections[i][low / 16]);
        __m256i second = _mm256_set1_epi32(f->corrections[i][high / 16]);
        for (int v = 0; v < vectors; v++)
            for (int side = 0; side < 2; side++) part[i][v][side][0] = first, part[i][v][side][1] = second;
    }
    for (int row = 0; row < FEW_ROWS; row += 2) {
        for (int line = 0; line < vectors; line++) ask(next);
        for (int v = 0; v < vectors; v++) {
            __m256i a = load(packed + row * stride + v * 32), b = load(packed + (row + 1) * stride + v * 32);
            __m256i pairs[2] = {_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)};
            for (int i = 0; i < tokens; i++) {
                __m256i x = _mm256_set1_epi32(f->pairs[i][(low + row) / 2]);
                __m256i y = _mm256_set1_epi32(f->pairs[i][(high + row) / 2]);
                for (int side = 0; side < 2; side++) {
                    __m256i *sum = part[i][v][side];
                    sum[0] = _mm256_add_epi16(sum[0], _mm256_maddubs_epi16(low_nibbles(pairs[side]), x));
                    sum[1] = _mm256_add_epi16(sum[1], _mm256_maddubs_epi16(high_nibbles(pairs[side]), y));
                }
            }
        }
    }
    for (int v = 0; v < vectors; v++) {
        __builtin_prefetch(multipliers + stride + v * 32);
        __m256i once = load(multipliers + v * 32), m[2];
        m[0] = _mm256_srai_epi16(_mm256_unpacklo_epi8(once, once), 8);
        m[1] = _mm256_srai_epi16(_mm256_unpackhi_epi8(once, once), 8);
        for (int i = 0; i < tokens; i++)
            for (int side = 0; side < 2; side++) {
                __m256i a = part[i][v][side][0], b = part[i][v][side][1];
                int32_t *sum = sums + i * pitch + v * 32 + side * 16;
                add_to(sum, _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), _mm256_unpacklo_epi16(m[side], m[side])));
                add_to(sum + 8,
                       _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), _mm256_unpackhi_epi16(m[side], m[side])));
            }
    }
}

// The same for at most FEW_ROWS rows of int8. A row beyond the last meets zeros, so any will do.
INLINE void few_bytes(const uint8_t *weights, int64_t stride, int64_t count, int tokens, int vectors, const few_rows *f,
                      int64_t from, ahead *next, int32_t *sums, int64_t pitch) {
    for (int v = 0; v < vectors; v++) {
        __m256i part[FEW][4];
        for (int i = 0; i < tokens; i++)
            for (int n = 0; n < 4; n++) part[i][n] = load(sums + i * pitch + v * 32 + n * 8);
        for (int64_t row = 0; row < count; row += 2) {
            ask(next);
            const uint8_t *even = weights + row * stride + v * 32, *odd = row + 1 < count ? even + stride : even;
            __m256i a = load(even), b = load(odd), w[4];
            __m256i low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b);
            // Each byte of a pair to 16 bits, where it stands.
            w[0] = _mm256_unpacklo_epi8(low, low), w[1] = _mm256_unpackhi_epi8(low, low);
            w[2] = _mm256_unpacklo_epi8(high, high), w[3] = _mm256_unpackhi_epi8(high, high);
            for (int n = 0; n < 4; n++) w[n] = _mm256_srai_epi16(w[n], 8);
            for (int i = 0; i < tokens; i++) {
                __m256i x = _mm256_set1_epi32(f->pairs[i][(from + row) / 2]);
                for (int n = 0; n < 4; n++) part[i][n] = _mm256_add_epi32(part[i][n], _mm256_madd_epi16(w[n], x));
            }
        }
        for (int i = 0; i < tokens; i++)
            for (int n = 0; n < 4; n++) _mm256_storeu_si256((__m256i *)(sums + i * pitch + v * 32 + n * 8), part[i][n]);
    }
}

// Makes `count` activations from k on ready.
INLINE void ready(few_rows *f, int i, const char *row, int32_t group, int64_t k, int64_t count) {
    if (!group) {
        for (int64_t at = 0; at < count; at += 2) f->pairs[i][at / 2] = int16_pair(row, k + at);
        return;
    }
    for (int64_t at = 0; at < count; at += 16) {
        __m128i x = int8_values(row, k + at);
        _mm_storeu_si128((__m128i *)(f->pairs[i] + at / 2), _mm_unpacklo_epi16(x, x));
        _mm_storeu_si128((__m128i *)(f->pairs[i] + at / 2 + 4), _mm_unpackhi_epi16(x, x));
        __m128i sums = _mm_madd_epi16(_mm_maddubs_epi16(_mm_set1_epi8(NIBBLE_ZERO), x), _mm_set1_epi16(-1));
        sums = _mm_hadd_epi32(sums, sums);
        int correction = _mm_cvtsi128_si32(_mm_hadd_epi32(sums, sums)) & 65535;
        f->corrections[i][at / 16] = correction | (int32_t)((uint32_t)correction << 16);
    }
}

// Adds to sums [tokens, pitch] what a block of a matrix gives in `width` columns from `column` on.
INLINE void few_block(const matrix *m, const few_rows *f, int tokens, int64_t k, int64_t count, int64_t column,
                      int64_t width, int32_t *sums, int64_t pitch) {
    int64_t stride = m->columns, half = m->group / 2;
    int most = 2 / tokens; // vectors of columns, as many as registers hold
    for (int64_t row = 0; row < (m->group ? count / 2 : count); row += FEW_ROWS) {
        const uint8_t *from = m->weights + ((m->group ? k / 2 : k) + row) * stride + column;
        ahead next = {from + FEW_ROWS * stride, stride, width, 0};
        for (int64_t at = 0; at < width;) {
            int vectors = width - at < most * 32 ? 1 : most;
            if (m->group) {
                int64_t low = row / half * m->group + row % half;
                const int8_t *multipliers = m->multipliers + (k + low) / m->group * stride + column + at;
                if (vectors == most)
                    few_nibbles(from + at, multipliers, stride, tokens, most, f, low, low + half, &next, sums + at,
                                pitch);
                else
                    few_nibbles(from + at, multipliers, stride, tokens, 1, f, low, low + half, &next, sums + at, pitch);
            } else
                few_bytes(from + at, stride, least(FEW_ROWS, count - row), tokens, vectors, f, row, &next, sums + at,
                          pitch);
            at += vectors * 32;
        }
    }
}

// Products of `tokens` rows (1 or 2) with rows `from` to `to` of a matrix, whole blocks unless it ends there, and
// `width` columns from `column` on, whole vectors of 32: sums [tokens, pitch].
INLINE void few_columns(const matrix *m, const char *const *rows, int tokens, int64_t from, int64_t to, int64_t column,
                        int64_t width, int32_t *sums, int64_t pitch) {
    few_rows f;
    ahead first = {m->weights + (m->group ? from / 2 : from) * m->columns + column, m->columns, width, 0};
    for (int64_t line = 0; line < least(FEW_ROWS, to - from) * (width / 64); line++) ask(&first);
    for (int i = 0; i < tokens; i++) memset(sums + i * pitch, 0, (size_t)width * sizeof *sums);
    for (int64_t k = from; k < to; k += BLOCK) {
        int64_t count = least(BLOCK, to - k);
        for (int i = 0; i < tokens; i++) ready(&f, i, rows[i], m->group, k, count);
        few_block(m, &f, tokens, k, count, column, width, sums, pitch);
    }
    for (int i = 0; i < tokens; i++)
        for (int32_t *at = sums + i * pitch; at < sums + i * pitch + width; at += 32) {
            __m256i v[4] = {load(at), load(at + 8), load(at + 16), load(at + 24)};
            _mm256_storeu_si256((__m256i *)at, _mm256_permute2x128_si256(v[0], v[1], 0x20));
            _mm256_storeu_si256((__m256i *)(at + 8), _mm256_permute2x128_si256(v[2], v[3], 0x20));
            _mm256_storeu_si256((__m256i *)(at + 16), _mm256_permute2x128_si256(v[0], v[1], 0x31));
            _mm256_storeu_si256((__m256i *)(at + 24), _mm256_permute2x128_si256(v[2], v[3], 0x31));
        }
}
