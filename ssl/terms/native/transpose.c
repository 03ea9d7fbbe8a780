#include "transpose.h"

#include "../../../backbones/native/processors.h"

/* A square of the strip, or what is left of one, by way of the nearest cache. */
static inline void turn(float *restrict out, const float *restrict x, size_t rows, size_t columns, size_t length,
                        size_t stride) {
    float square[STRIP * STRIP];
    for (size_t i = 0; i < rows; i++)
        for (size_t k = 0; k < columns; k++) square[i * STRIP + k] = x[i * stride + k];
    for (size_t k = 0; k < columns; k++)
        for (size_t i = 0; i < rows; i++) out[k * length + i] = square[i * STRIP + k];
}

FOR_EACH_PROCESSOR
void nestling_transpose(float *out, const float *x, size_t rows, size_t columns, size_t stride) {
    for (size_t row = 0; row < rows; row += STRIP)
        for (size_t at = 0; at < columns; at += STRIP) {
            float *to = out + at * rows + row;
            const float *from = x + row * stride + at;
            if (columns - at >= STRIP && rows - row >= STRIP)
                turn(to, from, STRIP, STRIP, rows, stride);
            else
                turn(to, from, rows - row < STRIP ? rows - row : STRIP, columns - at < STRIP ? columns - at : STRIP,
                     rows, stride);
        }
}
