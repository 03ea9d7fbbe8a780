/* Antialiased bicubic resize of a box of an image, in whole numbers of 16 bits.

Columns are summed first, as Pillow does: LANES rows are turned, so that all of them are summed at once, and
turned back; then rows are summed. Levels start as 128 parts each, and a weighted sum halves the parts: that
leaves 16 bits room for what bicubic overshoots, and for weights up to 2, as borders have them. Each product
is rounded, which adds up where there are MANY: there, sums of 32 bits are rounded once.
*/

#include "native.h"
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define LANES 16 /* rows of the box whose columns are summed together */
#define BLOCK 8  /* side of the squares that are turned */
#define ONE 16384
#define BEFORE 128 /* parts of a level */
#define AFTER 32   /* both sums */
#define MANY 40    /* weights of a pixel: shrunk to less than a ninth */

/* The weights of a resize along one axis: of pixels first[i] and on, count[i] of them, in pixel i. */
typedef struct {
    int *first, *count;
    short *weights; /* (S, most), 1 is ONE */
    size_t most;
} Axis;

static double widening(int before, int after) { return before > after ? (double)before / after : 1; }

static size_t most_weights(int before, int after) { return (size_t)ceil(2 * widening(before, after)) * 2 + 1; }

static float bicubic(float x) {
    x = fabsf(x);
    if (x < 1) return (1.5f * x - 2.5f) * x * x + 1;
    return x < 2 ? ((-0.5f * x + 2.5f) * x - 4) * x + 2 : 0;
}

/* Antialiased: the filter is as much wider as there are more pixels before than after. */
static Axis axis_of(int before, int after, int flip, char **room) {
    double scale = (double)before / after, wide = widening(before, after), reach = 2 * wide;
    size_t most = most_weights(before, after);
    int *first = nestling_take(room, sizeof(int) * 2 * after);
    Axis axis = {first, first + after, nestling_take(room, sizeof(short) * after * most), most};
    float *exact = nestling_take(room, sizeof(float) * most);
    for (int i = 0; i < after; i++) {
        double center = (i + 0.5) * scale, low = center - reach + 0.5, high = center + reach + 0.5;
        int start = low < 0 ? 0 : (int)low, end = high > before ? before : (int)high, at = flip ? after - 1 - i : i;
        float offset = (float)((start + 0.5 - center) / wide), step = (float)(1 / wide);
        double sum = 0, so_far = 0;
        for (int k = 0; k < end - start; k++) sum += exact[k] = bicubic(offset + k * step);
        for (int k = 0, before_it = 0; k < end - start; k++) { /* sums so far are rounded: all weights make ONE */
            so_far += exact[k] * (ONE / sum);
            int with_it = (int)(so_far + ONE + 0.5) - ONE; /* as one above 0 */
            axis.weights[at * most + k] = (short)(with_it - before_it);
            before_it = with_it;
        }
        axis.first[at] = start;
        axis.count[at] = end - start;
    }
    return axis;
}

static size_t axis_room(int before, int after) {
    size_t most = most_weights(before, after);
    return nestling_room(sizeof(int) * 2 * after) + nestling_room(sizeof(short) * after * most) +
           nestling_room(sizeof(float) * most);
}

/* level * weight / 2 ONE, rounded: one instruction on most processors. */
static inline short part(short level, short weight) {
    return (short)((((int)level * weight >> 14) + 1) >> 1);
}

static inline short within(short parts, short most) {
    parts = parts < 0 ? 0 : parts;
    return parts > most ? most : parts;
}

FOR_EACH_PROCESSOR
static void to_parts(short *restrict out, const unsigned char *restrict levels, int n) {
    for (int i = 0; i < n; i++) out[i] = (short)(levels[i] * BEFORE);
}

/* (BLOCK, BLOCK) transposed. */
static void turn_block(short *restrict out, size_t out_stride, const short *restrict rows, size_t stride) {
#ifdef __SSE2__
    __m128i a[BLOCK], b[BLOCK];
    for (int i = 0; i < BLOCK; i++) a[i] = _mm_loadu_si128((const __m128i *)(rows + i * stride));
    for (int round = 0; round < 3; round++) { /* rows i and i + 4 zipped, three times */
        for (int i = 0; i < BLOCK / 2; i++) {
            b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
            b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
        }
        memcpy(a, b, sizeof(a));
    }
    for (int i = 0; i < BLOCK; i++) _mm_storeu_si128((__m128i *)(out + i * out_stride), a[i]);
#else
    for (int i = 0; i < BLOCK; i++)
        for (int k = 0; k < BLOCK; k++) out[i * out_stride + k] = rows[k * stride + i];
#endif
}

/* (height, width) transposed, both multiples of BLOCK. */
static void turn(short *restrict out, const short *restrict rows, int height, int width) {
    for (int y = 0; y < height; y += BLOCK)
        for (int x = 0; x < width; x += BLOCK)
            turn_block(out + (size_t)x * height + y, height, rows + (size_t)y * width + x, width);
}

/* out[i] = sum over k of weights[k] * rows[k][i], four rows at a time. */
FOR_EACH_PROCESSOR
static void sum_rows(short *restrict out, const short *restrict rows, size_t length, const short *weights,
                     int count) {
    for (int k = 0; k < count; k += 4) {
        const short *row[4];
        short w[4];
        for (int j = 0; j < 4; j++) {
            row[j] = rows + (k + j < count ? (k + j) * length : 0);
            w[j] = k + j < count ? weights[k + j] : 0;
        }
        const short *a = row[0], *b = row[1], *c = row[2], *d = row[3];
        for (size_t i = 0; i < length; i++) {
            short sum = (short)(part(a[i], w[0]) + part(b[i], w[1]) + part(c[i], w[2]) + part(d[i], w[3]));
            out[i] = k ? (short)(out[i] + sum) : sum;
        }
    }
}

/* As `part`, of a sum of level * weight. */
static inline short parts_of(int sum) { return (short)((sum + ONE) >> 15); }

/* The same for many rows, BLOCK columns at a time. */
FOR_EACH_PROCESSOR
static void sum_many_rows(short *restrict out, const short *restrict rows, size_t length, const short *weights,
                          int count) {
    for (size_t at = 0; at < length; at += BLOCK) {
        int sum[BLOCK] = {0};
        for (int k = 0; k < count; k++)
            for (int i = 0; i < BLOCK; i++) sum[i] += rows[k * length + at + i] * weights[k];
        for (int i = 0; i < BLOCK; i++) out[at + i] = parts_of(sum[i]);
    }
}

/* One weighted sum of pixels for each lane, clipped as Pillow's is; `step` apart. */
static inline void sum_one(short *restrict out, const short *restrict from, size_t step, const short *weights,
                           int count) {
    short sum[LANES] = {0};
    for (int k = 0; k < count; k++, from += step)
        for (int lane = 0; lane < LANES; lane++) sum[lane] = (short)(sum[lane] + part(from[lane], weights[k]));
    for (int lane = 0; lane < LANES; lane++) out[lane] = within(sum[lane], 255 * BEFORE / 2);
}

/* The same of many pixels. */
static inline void sum_many(short *restrict out, const short *restrict from, size_t step, const short *weights,
                            int count) {
    int sum[LANES] = {0};
    for (int k = 0; k < count; k++, from += step)
        for (int lane = 0; lane < LANES; lane++) sum[lane] += from[lane] * weights[k];
    for (int lane = 0; lane < LANES; lane++) out[lane] = within(parts_of(sum[lane]), 255 * BEFORE / 2);
}

/* Three channels beside each other, as the sums of one would wait for themselves. */
static inline void sum_three(short *restrict out, size_t plane, const short *restrict from, const short *weights,
                             int count) {
    short red[LANES] = {0}, green[LANES] = {0}, blue[LANES] = {0};
    for (int k = 0; k < count; k++, from += 3 * LANES) {
        short weight = weights[k];
        for (int lane = 0; lane < LANES; lane++) red[lane] = (short)(red[lane] + part(from[lane], weight));
        for (int lane = 0; lane < LANES; lane++) green[lane] = (short)(green[lane] + part(from[lane + LANES], weight));
        for (int lane = 0; lane < LANES; lane++) blue[lane] = (short)(blue[lane] + part(from[lane + 2 * LANES], weight));
    }
    for (int lane = 0; lane < LANES; lane++) out[lane] = within(red[lane], 255 * BEFORE / 2);
    for (int lane = 0; lane < LANES; lane++) out[plane + lane] = within(green[lane], 255 * BEFORE / 2);
    for (int lane = 0; lane < LANES; lane++) out[2 * plane + lane] = within(blue[lane], 255 * BEFORE / 2);
}

FOR_EACH_PROCESSOR
static void sum_columns(short *restrict out, size_t plane, const short *restrict turned, const Axis *axis, int size,
                        int channels) {
    size_t step = (size_t)channels * LANES;
    for (int x = 0; x < size; x++, out += LANES) {
        const short *weights = axis->weights + x * axis->most, *from = turned + axis->first[x] * step;
        if (axis->most > MANY)
            for (int c = 0; c < channels; c++)
                sum_many(out + c * plane, from + c * LANES, step, weights, axis->count[x]);
        else if (channels == 3)
            sum_three(out, plane, from, weights, axis->count[x]);
        else
            for (int c = 0; c < channels; c++)
                sum_one(out + c * plane, from + c * LANES, step, weights, axis->count[x]);
    }
}

/* Back to levels. */
FOR_EACH_PROCESSOR
static void to_levels(float *restrict out, const short *restrict parts, int n) {
    for (int i = 0; i < n; i++) out[i] = (float)within(parts[i], 255 * AFTER) * (1.0f / AFTER);
}

static int whole(int length, int of) { return (length + of - 1) / of * of; }

static size_t middle_room(int height, int channels, int size) {
    return nestling_room(sizeof(short) * channels * whole(height, LANES) * whole(size, BLOCK));
}

static size_t rows_room(int width, int channels, int size) {
    size_t length = whole(width * channels, BLOCK), side = whole(size, BLOCK);
    return nestling_room(sizeof(short) * LANES * (2 * length + side * channels));
}

size_t nestling_resize_room(int height, int width, int channels, int size) {
    return axis_room(height, size) + axis_room(width, size) + middle_room(height, channels, size) +
           rows_room(width, channels, size);
}

void nestling_resize(float *planes, const unsigned char *box, size_t stride, int height, int width, int channels,
                     int size, int flip, char *room) {
    Axis down = axis_of(height, size, 0, &room), across = axis_of(width, size, flip, &room);
    int length = whole(width * channels, BLOCK), side = whole(size, BLOCK), tall = whole(height, LANES);
    size_t plane = (size_t)side * LANES;
    short *middle = nestling_take(&room, middle_room(height, channels, size)); /* (C, tall, side) */
    short *rows = nestling_take(&room, rows_room(width, channels, size));
    short *turned = rows + (size_t)LANES * length, *summed = turned + (size_t)LANES * length;
    memset(rows, 0, rows_room(width, channels, size)); /* what pads rows is turned with them */
    for (int y = 0; y < height; y += LANES) {
        for (int lane = 0; lane < LANES && y + lane < height; lane++)
            to_parts(rows + (size_t)lane * length, box + (y + lane) * stride, width * channels);
        turn(turned, rows, LANES, length);
        sum_columns(summed, plane, turned, &across, size, channels);
        for (int c = 0; c < channels; c++)
            turn(middle + ((size_t)c * tall + y) * side, summed + c * plane, side, LANES);
    }
    for (int c = 0; c < channels; c++)
        for (int y = 0; y < size; y++) {
            const short *from = middle + ((size_t)c * tall + down.first[y]) * side;
            const short *weights = down.weights + y * down.most;
            if (down.most > MANY)
                sum_many_rows(summed, from, side, weights, down.count[y]);
            else
                sum_rows(summed, from, side, weights, down.count[y]);
            to_levels(planes + ((size_t)c * size + y) * size, summed, size);
        }
}
