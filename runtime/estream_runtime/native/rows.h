// Quantised activations and stored matrices, as every path sees them. FORMAT.md section 7, annex A.
#pragma once

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum {
    NIBBLE_ZERO = 8,
    BLOCK = 256,       // rows of a matrix (K) that are made ready at a time: whole groups
    STRIP = 32,        // rows of a matrix that share one correction
    BYTE_ROWS = 16,    // rows of int8 are made ready so many at a time
    TOKENS = 256,      // token rows that make use of a block at a time
    AHEAD = 16,        // rows of a matrix by which memory is asked ahead: processors do not look a row ahead themselves
    FEW_ROWS = 16,     // rows of bytes that few token rows meet at a time, see few.h
    ROW_ALIGNMENT = 64 // quantised rows are padded with zeros to this many values
};

// A stored matrix [rows, columns]; group is 0 for w8, where `weights` are int8, and 32 or 64 for nibbles.
typedef struct {
    const uint8_t *weights;
    const int8_t *multipliers; // [groups, columns], nibbles only
    const float *scale;        // [columns]
    const float *bias;         // [columns], added to every product, or NULL
    int64_t rows, columns;
    int32_t group;
} matrix;

// Token rows [T, K] as integers: each row holds what row_bytes says for the path.
typedef struct {
    const char *data;
    const float *scale; // [T]
    int64_t stride;     // bytes from row to row
} quantised;

INLINE int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
INLINE int64_t round_up(int64_t value, int64_t unit) { return parts(value, unit) * unit; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int32_t load_32(const void *from) {
    int32_t value;
    memcpy(&value, from, sizeof value);
    return value;
}
