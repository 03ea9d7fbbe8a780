#include "gelu.h"

#include <math.h>

#include "numbers.h"
#include "processors.h"

#define CHUNK 512
#define STEPS 16384.0f

/* exp(-a^2 / 2), for a from 0 to 13, to 1e-7 (1 + a^2) of it: 2^n times a polynomial in the rest of the exponent,
   which is at most 1 / 2. Adding 1.5 * 2^23 rounds, and leaves n in the last bits. */
static inline float bell(float a) {
    const float rounding = 12582912.0f;
    float exponent = a * a * -0.721347520f, shifted = exponent + rounding, rest = exponent - (shifted - rounding);
    float p = 1.32765111e-3f;
    p = p * rest + 9.67554121e-3f;
    p = p * rest + 5.55071312e-2f;
    p = p * rest + 2.40221197e-1f;
    p = p * rest + 6.93146967e-1f;
    p = p * rest + 1.0f;
    uint32_t bits, power;
    memcpy(&bits, &p, sizeof bits);
    memcpy(&power, &shifted, sizeof power);
    bits += power << 23;
    memcpy(&p, &bits, sizeof bits);
    return p;
}

/* NaN stays.

   With t = 1 / (1 + 0.3 a), Phi(-a) exp(a^2 / 2) is t times a polynomial in t, fitted for a to 14 with the least
   largest error relative to it, which may grow as 1 + a: 3e-8 of it at 0. So the left tail keeps its digits, which are
   lost where 1 + erf is taken. Beyond 13 all is 0 or 1. */
static inline void values(float *restrict to, float *restrict slopes, const float *restrict from, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float x = from[i] < -13.0f ? -13.0f : from[i], c = x > 13.0f ? 13.0f : x, a = fabsf(c);
        float t = 1.0f / (1.0f + 0.3f * a), p = 3.66175964e-2f;
        p = p * t - 1.60943770e-1f;
        p = p * t + 2.12441907e-1f;
        p = p * t - 5.89242162e-2f;
        p = p * t + 1.31122165e-1f;
        p = p * t + 9.92079616e-2f;
        p = p * t + 1.20854807e-1f;
        p = p * t + 1.19623562e-1f;
        float e = bell(a), tail = p * t * e, below = c < 0.0f ? tail : 1.0f - tail;
        to[i] = x * below;
        slopes[i] = below + c * (e * 0.398942280f);
    }
}

static inline void whole_of(float *restrict to, const uint16_t *restrict from, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = nestling_whole_of(from[i]);
}

static inline void half_of(uint16_t *restrict to, const float *restrict from, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = nestling_half_of(from[i]);
}

/* The nearest; what is positive is rounded down. NaN, of which the value tells, becomes a number. */
static inline void steps_of(int16_t *restrict to, const float *restrict slopes, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float slope = slopes[i] > -0.25f ? slopes[i] : -0.25f;
        to[i] = (int16_t)((int)(slope * STEPS + 4096.5f) - 4096);
    }
}

/* In chunks, which stay in the nearest cache on their way from and to bf16. */
FOR_EACH_PROCESSOR
void nestling_gelu(void *out, void *slopes, const void *x, size_t n, int is_half) {
    float wide[CHUNK], value[CHUNK], slope[CHUNK];
    for (size_t at = 0; at < n; at += CHUNK) {
        size_t count = n - at < CHUNK ? n - at : CHUNK;
        if (is_half) whole_of(wide, (const uint16_t *)x + at, count);
        values(is_half ? value : (float *)out + at, is_half ? slope : (float *)slopes + at,
               is_half ? wide : (const float *)x + at, count);
        if (is_half) half_of((uint16_t *)out + at, value, count);
        if (is_half) steps_of((int16_t *)slopes + at, slope, count);
    }
}

FOR_EACH_PROCESSOR
void nestling_gelu_backward(uint16_t *restrict out, const uint16_t *restrict gradient, const int16_t *restrict slopes,
                            size_t n) {
    for (size_t i = 0; i < n; i++)
        out[i] = nestling_half_of(nestling_whole_of(gradient[i]) * ((float)slopes[i] * (1.0f / STEPS)));
}
