// One or two token rows times a matrix as it is stored, with AVX2: for so few nothing is made ready.
//
// A byte of nibbles holds rows r and r + group / 2 of a column, so both are what `vpmaddubsw` takes against the pair of
// those two activations. Eight such sums less what the zero point adds stay below 2^15.
#pragma once

#define FEW 2          // most token rows
#define FEW_WIDTH 1024 // most columns of a task

// What a block of quantised rows is to the products below, made ready: for each row of bytes the pair of activations it
// meets, and a correction for each 8 of those; or for each two rows of int8 two int16.
typedef struct {
    int16_t pairs[FEW][BLOCK / 2], corrections[FEW][BLOCK / 16];
    int32_t wide[BLOCK / 2][FEW];
} few_rows;

// Adds to sums[i][0..3], columns 0-3 and 16-19, 4-7 and 20-23, and so on, what a group of 32 columns gives.
// `from` is its first row of bytes in what is made ready.
INLINE void few_nibbles(const uint8_t *packed, const int8_t *multipliers, int64_t stride, int half, int tokens,
                        const few_rows *f, int64_t from, __m256i (*sums)[4]) {
    __m256i once = load(multipliers), m[4];
    __m256i low = _mm256_srai_epi16(_mm256_unpacklo_epi8(once, once), 8);
    __m256i high = _mm256_srai_epi16(_mm256_unpackhi_epi8(once, once), 8);
    m[0] = _mm256_unpacklo_epi16(low, low), m[1] = _mm256_unpackhi_epi16(low, low);
    m[2] = _mm256_unpacklo_epi16(high, high), m[3] = _mm256_unpackhi_epi16(high, high);
    for (int row = 0; row < half; row += 16) {
        __m256i part[2][FEW][2];
        for (int side = 0; side < 2; side++) {
            int first = row + side * 8;
            for (int i = 0; i < tokens; i++)
                part[side][i][0] = part[side][i][1] = _mm256_set1_epi16(f->corrections[i][(from + first) / 8]);
            for (int r = first; r < first + 8; r++) {
                __builtin_prefetch(packed + (r + half) * stride);
                __m256i bytes = load(packed + r * stride);
                low = low_nibbles(bytes), high = high_nibbles(bytes);
                __m256i left = _mm256_unpacklo_epi8(low, high), right = _mm256_unpackhi_epi8(low, high);
                for (int i = 0; i < tokens; i++) {
                    __m256i x = _mm256_set1_epi16(f->pairs[i][from + r]);
                    part[side][i][0] = _mm256_add_epi16(part[side][i][0], _mm256_maddubs_epi16(left, x));
                    part[side][i][1] = _mm256_add_epi16(part[side][i][1], _mm256_maddubs_epi16(right, x));
                }
            }
        }
        for (int i = 0; i < tokens; i++)
            for (int v = 0; v < 2; v++) {
                __m256i a = part[0][i][v], b = part[1][i][v];
                __m256i left = _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), m[2 * v]);
                __m256i right = _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), m[2 * v + 1]);
                sums[i][2 * v] = _mm256_add_epi32(sums[i][2 * v], left);
                sums[i][2 * v + 1] = _mm256_add_epi32(sums[i][2 * v + 1], right);
            }
    }
}

// The same for two rows of int8.
INLINE void few_bytes(const uint8_t *even, const uint8_t *odd, int tokens, const int32_t *pairs, __m256i (*sums)[4]) {
    __builtin_prefetch(even + AHEAD * (odd - even));
    __builtin_prefetch(odd + AHEAD * (odd - even));
    __m256i a = load(even), b = load(odd);
    __m256i low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b), w[4];
    // Each byte of a pair to 16 bits, where it stands.
    w[0] = _mm256_unpacklo_epi8(low, low), w[1] = _mm256_unpackhi_epi8(low, low);
    w[2] = _mm256_unpacklo_epi8(high, high), w[3] = _mm256_unpackhi_epi8(high, high);
    for (int v = 0; v < 4; v++) w[v] = _mm256_srai_epi16(w[v], 8);
    for (int i = 0; i < tokens; i++)
        for (int v = 0; v < 4; v++)
            sums[i][v] = _mm256_add_epi32(sums[i][v], _mm256_madd_epi16(w[v], _mm256_set1_epi32(pairs[i])));
}

INLINE void ready_pairs(few_rows *f, int i, const char *row, int64_t k, int64_t count, int half, int32_t group) {
    for (int64_t byte = 0; byte < count / 2; byte += 16) {
        int64_t at = k + byte / half * group + byte % half;
        __m128i a = int8_values(row, at), b = int8_values(row, at + half);
        __m128i each[2] = {_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b)};
        for (int side = 0; side < 2; side++) {
            _mm_storeu_si128((__m128i *)(f->pairs[i] + byte + side * 8), each[side]);
            __m128i sums = _mm_maddubs_epi16(_mm_set1_epi8(NIBBLE_ZERO), each[side]);
            sums = _mm_madd_epi16(sums, _mm_set1_epi16(-1));
            sums = _mm_hadd_epi32(sums, sums);
            f->corrections[i][byte / 8 + side] = (int16_t)_mm_cvtsi128_si32(_mm_hadd_epi32(sums, sums));
        }
    }
}

// Adds to sums [tokens, FEW_WIDTH] what `count` rows of a matrix from k + row on give: a group, or an even number.
INLINE void add_few(const matrix *m, const few_rows *f, int tokens, int64_t k, int64_t row, int64_t count,
                    int64_t column, int32_t *sums) {
    int64_t stride = m->columns;
    __m256i each[FEW][4];
    for (int i = 0; i < tokens; i++)
        for (int v = 0; v < 4; v++) each[i][v] = load(sums + i * FEW_WIDTH + v * 8);
    if (m->group)
        few_nibbles(m->weights + (k + row) / 2 * stride + column,
                    m->multipliers + (k + row) / m->group * stride + column, stride, m->group / 2, tokens, f, row / 2,
                    each);
    else
        for (int64_t at = row; at < row + count; at += 2) {
            const uint8_t *even = m->weights + (k + at) * stride + column;
            // A row beyond the last meets zeros, so any will do.
            few_bytes(even, k + at + 1 < m->rows ? even + stride : even, tokens, f->wide[at / 2], each);
        }
    for (int i = 0; i < tokens; i++)
        for (int v = 0; v < 4; v++) _mm256_storeu_si256((__m256i *)(sums + i * FEW_WIDTH + v * 8), each[i][v]);
}

// Products of `tokens` rows (1 or 2) with `width` columns from `first` on, whole vectors of 32: sums
// [tokens, FEW_WIDTH].
INLINE void few_columns(const matrix *m, const char *const *rows, int tokens, int64_t first, int64_t width,
                        int32_t *sums) {
    few_rows f;
    int64_t half = m->group / 2, all = m->group ? round_up(m->rows, m->group) : m->rows;
    memset(sums, 0, (size_t)(tokens * FEW_WIDTH) * sizeof *sums);
    for (int64_t k = 0; k < all; k += BLOCK) {
        int64_t count = least(BLOCK, all - k);
        for (int i = 0; i < tokens; i++)
            if (m->group)
                ready_pairs(&f, i, rows[i], k, count, (int)half, m->group);
            else
                for (int64_t pair = 0; pair < (count + 1) / 2; pair++)
                    f.wide[pair][i] = int16_pair(rows[i], k + pair * 2);
        // Some rows of all columns, then the next: memory is read in stretches as long as a task is wide.
        int64_t step = m->group ? m->group : AHEAD;
        for (int64_t row = 0; row < count; row += step)
            for (int64_t column = first; column < first + width; column += 32)
                add_few(m, &f, tokens, k, row, least(step, count - row), column, sums + column - first);
    }
    for (int32_t *at = sums; at < sums + tokens * FEW_WIDTH; at += 32) {
        __m256i v[4] = {load(at), load(at + 8), load(at + 16), load(at + 24)};
        _mm256_storeu_si256((__m256i *)at, _mm256_permute2x128_si256(v[0], v[1], 0x20));
        _mm256_storeu_si256((__m256i *)(at + 8), _mm256_permute2x128_si256(v[2], v[3], 0x20));
        _mm256_storeu_si256((__m256i *)(at + 16), _mm256_permute2x128_si256(v[0], v[1], 0x31));
        _mm256_storeu_si256((__m256i *)(at + 24), _mm256_permute2x128_si256(v[2], v[3], 0x31));
    }
}
