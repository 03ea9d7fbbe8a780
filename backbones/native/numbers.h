/* Arithmetic of single numbers, made for loops that a compiler turns into vectors. */

#include <stdint.h>
#include <string.h>

/* exp(x) for x <= 0, to 1e-7 of it; 0 where it is below what fp32 holds in full.

   With n = round(x / log 2) it is 2^n exp(r): the rest r is at most log 2 / 2, for which a polynomial is
   fitted. Adding 1.5 * 2^23 rounds, and leaves n in the last bits. log 2 is in two parts, the first short
   enough that n times it is exact. */
static inline float nestling_exponential(float x) {
    const float lowest = -87.0f, rounding = 12582912.0f;
    float y = x < lowest ? lowest : x; /* NaN stays */
    float shifted = y * 1.44269504f + rounding, n = shifted - rounding;
    float r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.38146009e-3f;
    p = p * r + 8.36871532e-3f;
    p = p * r + 4.16683879e-2f;
    p = p * r + 1.66665206e-1f;
    p = p * r + 4.99999934e-1f;
    p = p * (r * r) + r + 1.0f;
    uint32_t bits;
    float power;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + 0x3f800000u;
    memcpy(&power, &bits, sizeof power);
    return x < lowest ? 0.0f : p * power;
}

/* bf16 is the upper half of fp32. */
static inline float nestling_whole_of(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The nearest bf16, the even one of two; NaN stays. */
static inline uint16_t nestling_half_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits += 0x7fffu + ((bits >> 16) & 1u);
    return x == x ? (uint16_t)(bits >> 16) : 0x7fc0;
}
