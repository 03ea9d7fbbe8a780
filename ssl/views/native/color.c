/* Colour jitter and gray. */

#include "native.h"

#define LANES 8    /* sums that run beside each other */
#define CHUNK 1024 /* pixels whose colours change together, in the nearest cache */

/* How much each of `channels` counts for gray: luma (ITU-R 601) of three, else their mean. */
static float gray_weight(int channel, int channels) {
    static const float luma[3] = {0.299f, 0.587f, 0.114f};
    return channels == 3 ? luma[channel] : 1.0f / channels;
}

/* In short stretches, as floats of many pixels would lose their last digits. */
FOR_EACH_PROCESSOR
static double mean_of(const float *levels, int n) {
    double total = 0;
    for (int at = 0; at < n; at += CHUNK) {
        int i = at, end = n - at < CHUNK ? n : at + CHUNK;
        float sums[LANES] = {0};
        for (; i + LANES <= end; i += LANES)
            for (int k = 0; k < LANES; k++) sums[k] += levels[i + k];
        for (; i < end; i++) total += levels[i];
        for (int k = 0; k < LANES; k++) total += sums[k];
    }
    return total / n;
}

/* x <- factor x + shift, into 0 … 255. */
FOR_EACH_PROCESSOR
static void scale(float *levels, int n, float factor, float shift) {
    for (int i = 0; i < n; i++) {
        float level = factor * levels[i] + shift;
        level = level < 0 ? 0 : level;
        levels[i] = level > 255 ? 255 : level;
    }
}

FOR_EACH_PROCESSOR
static void add_weighted(float *restrict out, const float *restrict levels, int n, float weight) {
    for (int i = 0; i < n; i++) out[i] += weight * levels[i];
}

FOR_EACH_PROCESSOR
static void mix(float *restrict levels, const float *restrict others, int n, float factor) {
    for (int i = 0; i < n; i++) {
        float level = factor * levels[i] + (1 - factor) * others[i];
        level = level < 0 ? 0 : level;
        levels[i] = level > 255 ? 255 : level;
    }
}

static void gray_of(float *out, const float *planes, size_t plane, int n, int channels) {
    memset(out, 0, sizeof(float) * n);
    for (int c = 0; c < channels; c++) add_weighted(out, planes + c * plane, n, gray_weight(c, channels));
}

void nestling_gray(float *out, const float *planes, int n, int channels) { gray_of(out, planes, n, n, channels); }

static void saturate(float *planes, size_t plane, int n, int channels, float factor) {
    float gray[CHUNK];
    if (channels == 1) return;
    gray_of(gray, planes, plane, n, channels);
    for (int c = 0; c < channels; c++) mix(planes + c * plane, gray, n, factor);
}

/* As color.shift_hue, by up to one sextant. */
FOR_EACH_PROCESSOR
static void turn_hue(float *restrict red, float *restrict green, float *restrict blue, int n, float sextants) {
    for (int i = 0; i < n; i++) {
        float r = red[i], g = green[i], b = blue[i];
        float top = r > g ? r : g, bottom = r < g ? r : g;
        top = b > top ? b : top;
        bottom = b < bottom ? b : bottom;
        float chroma = top - bottom, rest = top - r - g - b, slope = chroma * sextants;
        float x = 2 * r + rest + (b - g < 0 ? -slope : slope);
        float y = 2 * g + rest + (r - b < 0 ? -slope : slope);
        float z = 2 * b + rest + (g - r < 0 ? -slope : slope);
        x = x < 0 ? 0 : x, y = y < 0 ? 0 : y, z = z < 0 ? 0 : z;
        red[i] = (x > chroma ? chroma : x) + bottom;
        green[i] = (y > chroma ? chroma : y) + bottom;
        blue[i] = (z > chroma ? chroma : z) + bottom;
    }
}

/* A sextant complements the colours and goes three back; two move each channel to the next. */
static void turn_whole(float *planes, size_t plane, int n, int sextants) {
    int turns = (sextants % 2 ? sextants - 3 : sextants) / 2;
    for (int i = 0; i < n; i++) {
        float old[3] = {planes[i], planes[i + plane], planes[i + 2 * plane]};
        float top = fmaxf(fmaxf(old[0], old[1]), old[2]), bottom = fminf(fminf(old[0], old[1]), old[2]);
        for (int c = 0; c < 3; c++) {
            float level = old[((c - turns) % 3 + 3) % 3];
            planes[i + c * plane] = sextants % 2 ? top + bottom - level : level;
        }
    }
}

static void shift_hue(float *planes, size_t plane, int n, int channels, float sextants) {
    int whole = (int)sextants;
    if (channels != 3) return;
    if (whole) turn_whole(planes, plane, n, whole);
    if (sextants != whole) turn_hue(planes, planes + plane, planes + 2 * plane, n, sextants - whole);
}

/* Contrast needs the mean of what came before it, so all pixels go through the operations up to it first. */
void nestling_jitter(float *planes, int n, int channels, const Jitter *drawn) {
    size_t plane = n;
    for (int start = 0, end; start < drawn->num_operations; start = end) {
        float contrast = drawn->order[start] == 1 ? drawn->factor[1] : 1;
        double mean = 0;
        for (end = start + 1; end < drawn->num_operations && drawn->order[end] != 1;) end++;
        if (contrast != 1 && channels == 3)
            for (int c = 0; c < 3; c++) mean += gray_weight(c, 3) * mean_of(planes + c * plane, n);
        for (int c = 0; contrast != 1 && c < channels; c++) {
            double own = channels == 3 ? mean : mean_of(planes + c * plane, n);
            scale(planes + c * plane, n, contrast, (float)((1 - contrast) * own));
        }
        for (int at = 0; at < n; at += CHUNK) {
            int count = n - at < CHUNK ? n - at : CHUNK;
            for (int step = start; step < end; step++) {
                int operation = drawn->order[step];
                float factor = drawn->factor[operation];
                if (operation == 0)
                    for (int c = 0; c < channels; c++) scale(planes + c * plane + at, count, factor, 0);
                if (operation == 2) saturate(planes + at, plane, count, channels, factor);
                if (operation == 3) shift_hue(planes + at, plane, count, channels, factor);
            }
        }
    }
}
