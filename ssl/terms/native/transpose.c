#include "transpose.h"

#include "../../../backbones/native/processors.h"

/* A square of the strip, or what is left of one, by way of the nearest cache; then all of them. */
#define TRANSPOSE(type, turn, all)                                                                                  \
    static inline void turn(type *restrict out, const type *restrict x, size_t rows, size_t columns, size_t length, \
                            size_t stride) {                                                                        \
        type square[STRIP * STRIP];                                                                                 \
        for (size_t i = 0; i < rows; i++)                                                                           \
            for (size_t k = 0; k < columns; k++) square[i * STRIP + k] = x[i * stride + k];                         \
        for (size_t k = 0; k < columns; k++)                                                                        \
            for (size_t i = 0; i < rows; i++) out[k * length + i] = square[i * STRIP + k];                          \
    }                                                                                                               \
                                                                                                                    \
    FOR_EACH_PROCESSOR                                                                                              \
    void all(type *out, const type *x, size_t rows, size_t columns, size_t stride) {                                \
        for (size_t row = 0; row < rows; row += STRIP)                                                              \
            for (size_t at = 0; at < columns; at += STRIP) {                                                        \
                type *to = out + at * rows + row;                                                                   \
                const type *from = x + row * stride + at;                                                           \
                size_t height = rows - row < STRIP ? rows - row : STRIP;                                            \
                size_t width = columns - at < STRIP ? columns - at : STRIP;                                         \
                if (height == STRIP && width == STRIP)                                                              \
                    turn(to, from, STRIP, STRIP, rows, stride);                                                     \
                else                                                                                                \
                    turn(to, from, height, width, rows, stride);                                                    \
            }                                                                                                       \
    }

TRANSPOSE(float, turn_whole, nestling_transpose)
TRANSPOSE(uint16_t, turn_halves, nestling_transpose_halves)
