/* Gaussian blur as three passes of an extended box along each axis; see blur.py. */

#include "native.h"

#define PASSES 3

/* One pass of the extended box: rows[0 … 2 reach + 2] stand around the row that is written. */
FOR_EACH_PROCESSOR
static void box_pass(float *restrict out, const float *const *rows, int reach, float edge, float weight, int n) {
    const float *first = rows[0], *last = rows[2 * reach + 2], *middle = rows[reach + 1];
    if (reach == 0) {
        for (int i = 0; i < n; i++) out[i] = weight * (middle[i] + edge * (first[i] + last[i]));
    } else if (reach == 1) {
        const float *before = rows[1], *after = rows[3];
        for (int i = 0; i < n; i++)
            out[i] = weight * ((middle[i] + (before[i] + after[i])) + edge * (first[i] + last[i]));
    } else {
        for (int i = 0; i < n; i++) out[i] = middle[i] + edge * (first[i] + last[i]);
        for (int k = 1; k <= 2 * reach + 1; k++) {
            if (k == reach + 1) continue; /* the middle */
            for (int i = 0; i < n; i++) out[i] += rows[k][i];
        }
        for (int i = 0; i < n; i++) out[i] *= weight;
    }
}

/* The l of the extended box. */
static int reach_of(double sigma) { return (int)((sqrt(12 * sigma * sigma / PASSES + 1) - 1) / 2); }

size_t nestling_blur_room(int size, double sigma) {
    size_t width = size + 2 * (size_t)(reach_of(sigma) + 1), area = (size_t)size * size;
    return nestling_room(sizeof(float) * (area + 2 * width)) + sizeof(float *) * (2 * (size_t)reach_of(sigma) + 3);
}

/* Rows among each other, then within themselves. */
void nestling_blur(float *plane, int size, double sigma, char *room) {
    double variance = sigma * sigma / PASSES;
    int reach = reach_of(sigma), around = reach + 1, width = size + 2 * around;
    float edge = (float)((2 * reach + 1) * (reach * (reach + 1) - 3 * variance) /
                         (6 * (variance - (double)(reach + 1) * (reach + 1))));
    float weight = 1 / (2 * (reach + edge) + 1);
    size_t area = (size_t)size * size;
    float *other = nestling_take(&room, sizeof(float) * (area + 2 * (size_t)width));
    const float **rows = (const float **)room;
    for (int pass = 0; pass < PASSES; pass++) {
        float *from = pass % 2 ? other : plane, *to = pass % 2 ? plane : other;
        for (int y = 0; y < size; y++) {
            for (int k = 0; k <= 2 * around; k++) {
                int at = y + k - around;
                rows[k] = from + (size_t)(at < 0 ? 0 : at >= size ? size - 1 : at) * size;
            }
            box_pass(to + (size_t)y * size, rows, reach, edge, weight, size);
        }
    }
    for (int y = 0; y < size; y++) { /* the third pass left the rows in `other` */
        float *from = other + area, *to = from + width;
        memcpy(from + around, other + (size_t)y * size, sizeof(float) * size);
        for (int pass = 0; pass < PASSES; pass++) {
            for (int k = 0; k < around; k++) {
                from[k] = from[around];
                from[around + size + k] = from[around + size - 1];
            }
            for (int k = 0; k <= 2 * around; k++) rows[k] = from + k;
            box_pass(pass == PASSES - 1 ? plane + (size_t)y * size : to + around, rows, reach, edge, weight, size);
            float *swap = from;
            from = to, to = swap;
        }
    }
}
