/* The two passes over a row. */

#include "rows.h"

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../../../backbones/native/numbers.h"
#include "../../../backbones/native/processors.h"

#define LANES 64 /* sums that run beside each other */

/* A chunk of the row from `at` on, put into `to` where it is not fp32. */
static inline const float *chunk_of(Entries row, float *restrict to, size_t at, size_t n) {
    const uint16_t *restrict halves = (const uint16_t *)row.at + at;
    if (!row.is_half) return (const float *)row.at + at;
    for (size_t i = 0; i < n; i++) to[i] = nestling_whole_of(halves[i]);
    return to;
}

/* Lanes are short sums within a chunk, for which fp32 is enough. */
static inline double total_of(float *lanes) {
    for (size_t half = LANES / 2; half >= 8; half /= 2)
        for (size_t k = 0; k < half; k++) lanes[k] += lanes[k + half];
    double total = 0;
    for (size_t k = 0; k < 8; k++) total += lanes[k];
    return total;
}

/* NaN is passed over here, and found by the exponentials. */
static inline float largest_of(float *tops) {
    for (size_t half = LANES / 2; half >= 1; half /= 2)
        for (size_t k = 0; k < half; k++) tops[k] = tops[k + half] > tops[k] ? tops[k + half] : tops[k];
    return tops[0];
}

/* -FLT_MAX lets -inf be the exponential 0. */
static inline float largest(const float *restrict x, size_t n) {
    size_t i = 0;
    float tops[LANES];
    for (size_t k = 0; k < LANES; k++) tops[k] = -FLT_MAX;
    for (; i + LANES <= n; i += LANES)
        for (size_t k = 0; k < LANES; k++) {
            float a = x[i + k], b = tops[k];
            tops[k] = a > b ? a : b;
        }
    for (; i < n; i++) tops[0] = x[i] > tops[0] ? x[i] : tops[0];
    return largest_of(tops);
}

static inline double sum(const float *restrict a, size_t n) {
    size_t i = 0;
    float lanes[LANES] = {0};
    for (; i + LANES <= n; i += LANES)
        for (size_t k = 0; k < LANES; k++) lanes[k] += a[i + k];
    for (; i < n; i++) lanes[0] += a[i];
    return total_of(lanes);
}

static inline double product(const float *restrict a, const float *restrict b, size_t n) {
    size_t i = 0;
    float lanes[LANES] = {0};
    for (; i + LANES <= n; i += LANES)
        for (size_t k = 0; k < LANES; k++) lanes[k] += a[i + k] * b[i + k];
    for (; i < n; i++) lanes[0] += a[i] * b[i];
    return total_of(lanes);
}

/* Done with `from` before a gradient takes its place. */
static inline void scale(float *restrict x, const float *restrict from, const float *restrict factor, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = from[i] * factor[i];
}

/* e = exp(x), of a chunk, once x is less its maximum `top`: their sum. */
static inline double exponentials(float *restrict e, float *restrict x, float top, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float below = x[i] - top;
        x[i] = below;
        e[i] = nestling_exponential(below);
    }
    return sum(e, n);
}

/* What exp(x - top) sums to over the row, `top` being its maximum. */
static double joined(Part *parts, size_t count, double *top) {
    double total = 0;
    *top = -FLT_MAX;
    for (size_t c = 0; c < count; c++) *top = parts[c].top > *top ? parts[c].top : *top;
    for (size_t c = 0; c < count; c++) total += parts[c].sum * exp(parts[c].top - *top);
    return total;
}

static inline size_t chunk_at(size_t at, size_t k) { return k - at < CHUNK ? k - at : CHUNK; }

FOR_EACH_PROCESSOR
void nestling_seen(float *out, const float *rows, size_t stride, int count, int but, float weight, size_t k) {
    int is_first = 1;
    memset(out, 0, sizeof(float) * k);
    for (int t = 0; t < count; t++) {
        const float *restrict row = rows + stride * t;
        float *restrict to = out;
        if (t == but) continue;
        if (is_first)
            for (size_t i = 0; i < k; i++) to[i] = weight * row[i];
        else
            for (size_t i = 0; i < k; i++) to[i] += weight * row[i];
        is_first = 0;
    }
}

/* (pull + share * e) * factor, which may be done in place. */
static inline void finish(float *to, const float *e, const float *restrict pull, float share,
                          const float *restrict factor, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = (pull[i] + share * e[i]) * factor[i];
}

FOR_EACH_PROCESSOR
double nestling_compare(Entries gradient, Entries logits, Row slope, const float *seen, Row rescale, double weight,
                        Part *parts, float *memory, size_t k) {
    float x[CHUNK], e[CHUNK];
    float *kept = gradient.is_half ? memory : gradient.at; /* all exponentials, for the second pass */
    size_t count = nestling_parts(k);
    double loss = 0, top;
    for (size_t c = 0; c < count; c++) {
        size_t at = c * CHUNK, n = chunk_at(at, k);
        scale(x, chunk_of(logits, e, at, n), slope.at + slope.step * at, n);
        loss += product(x, seen + at, n);
        float own = largest(x, n);
        parts[c] = (Part){own, exponentials(gradient.at ? kept + at : e, x, own, n), 0};
    }
    double total = joined(parts, count, &top);
    for (size_t c = 0; gradient.at && c < count; c++) {
        size_t at = c * CHUNK, n = chunk_at(at, k);
        float share = (float)(weight * exp(parts[c].top - top) / total);
        const float *factor = rescale.at + rescale.step * at;
        if (gradient.is_half) {
            uint16_t *restrict halves = (uint16_t *)gradient.at + at;
            finish(x, kept + at, seen + at, share, factor, n);
            for (size_t i = 0; i < n; i++) halves[i] = nestling_half_of(x[i]);
        } else
            finish(kept + at, kept + at, seen + at, share, factor, n);
    }
    return loss + weight * (top + log(total));
}

/* The first that is x. */
static size_t place_of(float x, const float *from, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (from[i] == x) return i;
    return 0;
}

FOR_EACH_PROCESSOR
double nestling_target(float *q, Entries logits, Row bias, Row slope, Part *parts, size_t k, size_t *winner) {
    float x[CHUNK];
    size_t count = nestling_parts(k), best = 0;
    double top, apart = 0;
    for (size_t c = 0; c < count; c++) {
        size_t at = c * CHUNK, n = chunk_at(at, k);
        const float *from = chunk_of(logits, x, at, n), *restrict factor = slope.at + slope.step * at;
        const float *restrict shift = bias.at + bias.step * at;
        for (size_t i = 0; i < n; i++) x[i] = shift[i] + from[i] * factor[i];
        float own = largest(x, n);
        if (c == 0 || own > parts[best].top) {
            best = c;
            *winner = at + place_of(own, x, n);
        }
        double total = exponentials(q + at, x, own, n);
        parts[c] = (Part){own, total, product(q + at, x, n)};
    }
    double total = joined(parts, count, &top);
    for (size_t c = 0; c < count; c++) {
        size_t at = c * CHUNK, n = chunk_at(at, k);
        double factor = exp(parts[c].top - top) / total;
        float share = (float)factor;
        float *restrict to = q + at;
        apart += factor * (parts[c].slope + (parts[c].top - top) * parts[c].sum);
        for (size_t i = 0; i < n; i++) to[i] *= share;
    }
    return log(total) - apart;
}

FOR_EACH_PROCESSOR
void nestling_add(float *restrict total, Entries row, size_t at, size_t n) {
    float x[CHUNK];
    const float *restrict from = chunk_of(row, x, at, n);
    for (size_t i = 0; i < n; i++) total[i] += from[i];
}
