/* One view of an image in one call: resize, flip, jitter, gray, blur, solarize.

The same operations as render.py, color.py and blur.py, which say where they come from, on planes of floats
that are rounded once at the end. Loops are written so that a compiler can turn them into vector
instructions; as a * b + c is not contracted, all of these give the same bits.

Shapes used below: S the side of the view, C channels, n pixels of a plane.
*/

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../../backbones/native/processors.h"

typedef struct {
    int order[4], num_operations; /* 0 brightness, 1 contrast, 2 saturation, 3 hue */
    float factor[4];              /* by operation; of hue in sextants */
} Jitter;

/* Memory is asked for once and handed out in whole cache lines. */
static inline size_t nestling_room(size_t bytes) { return (bytes + 63) / 64 * 64; }

static inline void *nestling_take(char **room, size_t bytes) {
    char *taken = *room;
    *room += nestling_room(bytes);
    return taken;
}

/* A box of (height, width, C) bytes -> planes (C, S, S). */
size_t nestling_resize_room(int height, int width, int channels, int size);
void nestling_resize(float *planes, const unsigned char *box, size_t stride, int height, int width, int channels,
                     int size, int flip, char *room);

/* As color.jitter, on planes (C, n). */
void nestling_jitter(float *planes, int n, int channels, const Jitter *drawn);

/* As color.to_gray, (C, n) -> (n,). */
void nestling_gray(float *out, const float *planes, int n, int channels);

/* As blur.gaussian_blur, on one plane (S, S). */
size_t nestling_blur_room(int size, double sigma);
void nestling_blur(float *plane, int size, double sigma, char *room);
