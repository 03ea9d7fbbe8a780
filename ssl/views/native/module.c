/* What Python sees: `render`, which checks that all lies within its buffers. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <limits.h>

#include "native.h"

#define MOST 16384 /* side or channels: their products fit their types */
#define MOST_KEPT (64 << 20)

/* Rounded; those of at least `threshold` inverted. */
FOR_EACH_PROCESSOR
static void finish(unsigned char *restrict out, const float *restrict levels, int n, int threshold) {
    for (int i = 0; i < n; i++) {
        int level = (int)(levels[i] + 0.5f);
        out[i] = (unsigned char)(level >= threshold ? 255 - level : level);
    }
}

typedef struct {
    const unsigned char *box; /* (height, width, C) of rows `stride` bytes apart */
    size_t stride;
    int height, width, channels, size, flip, is_gray, threshold;
    Jitter jitter;
    double sigma;
} View;

static size_t planes_room(const View *view) {
    return nestling_room(sizeof(float) * view->size * view->size * (view->channels + 1));
}

static size_t room_of(const View *view) {
    size_t resize = nestling_resize_room(view->height, view->width, view->channels, view->size);
    size_t blur = nestling_blur_room(view->size, view->sigma);
    return planes_room(view) + (resize > blur ? resize : blur);
}

static void draw(unsigned char *out, const View *view, char *room) {
    int channels = view->channels, n = view->size * view->size, made = view->is_gray ? 1 : channels;
    float *planes = nestling_take(&room, planes_room(view)), *gray = planes + (size_t)n * channels;
    nestling_resize(planes, view->box, view->stride, view->height, view->width, channels, view->size, view->flip,
                    room);
    nestling_jitter(planes, n, channels, &view->jitter);
    if (view->is_gray) nestling_gray(gray, planes, n, channels);
    for (int c = 0; c < made; c++) {
        float *plane = view->is_gray ? gray : planes + (size_t)n * c;
        if (view->sigma > 0) nestling_blur(plane, view->size, view->sigma, room);
        finish(out + (size_t)n * c, plane, n, view->threshold);
    }
    for (int c = made; c < channels; c++) memcpy(out + (size_t)n * c, out, n);
}

/* Memory is kept for the next call, as new memory costs as much as a resize. Python's lock guards it. */
typedef struct {
    char *room;
    size_t size;
} Memory;

static Memory spare;

static Memory taken(size_t size) {
    Memory memory = spare;
    spare = (Memory){NULL, 0};
    if (memory.size >= size) return memory;
    free(memory.room);
    return (Memory){malloc(size), size};
}

static void give_back(Memory memory) {
    if (memory.size <= spare.size || memory.size > MOST_KEPT) {
        free(memory.room);
    } else {
        free(spare.room);
        spare = memory;
    }
}

static PyObject *render(PyObject *self, PyObject *arguments) {
    Py_buffer image, out;
    View view = {0};
    int rows, columns, top, left;
    float *factor = view.jitter.factor;
    const char *order;
    Py_ssize_t num_operations;
    if (!PyArg_ParseTuple(arguments, "y*(iii)(iiii)ipy#(ffff)pdiw*", &image, &rows, &columns, &view.channels, &top,
                          &left, &view.height, &view.width, &view.size, &view.flip, &order, &num_operations,
                          &factor[0], &factor[1], &factor[2], &factor[3], &view.is_gray, &view.sigma, &view.threshold,
                          &out))
        return NULL;
    view.stride = (size_t)columns * view.channels;
    int fits = rows > 0 && columns > 0 && view.channels > 0 && view.channels <= MOST && view.size > 0 &&
               view.size <= MOST && view.stride <= INT_MAX / 2 && top >= 0 && left >= 0 && view.height > 0 &&
               view.width > 0 && view.height <= rows - top && view.width <= columns - left && num_operations <= 4 &&
               view.sigma >= 0 && view.sigma <= MOST && image.len == (Py_ssize_t)(rows * view.stride) &&
               out.len == (Py_ssize_t)view.size * view.size * view.channels;
    for (int k = 0; fits && k < num_operations; k++) {
        view.jitter.order[k] = order[k];
        fits = order[k] >= 0 && order[k] < 4;
    }
    view.jitter.num_operations = (int)num_operations;
    factor[3] *= 6; /* turns to sextants */
    Memory memory = fits ? taken(room_of(&view)) : (Memory){NULL, 0};
    int done = memory.room != NULL;
    if (done) {
        view.box = (unsigned char *)image.buf + top * view.stride + (size_t)left * view.channels;
        Py_BEGIN_ALLOW_THREADS;
        draw(out.buf, &view, memory.room);
        Py_END_ALLOW_THREADS;
        give_back(memory);
    }
    PyBuffer_Release(&image);
    PyBuffer_Release(&out);
    if (!fits) return PyErr_Format(PyExc_ValueError, "the box, the order or a buffer does not fit the sizes told");
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"render", render, METH_VARARGS,
     "render(image, (rows, columns, channels), (top, left, height, width), size, flip, order, (brightness, contrast, "
     "saturation, hue), gray, sigma, threshold, out)"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kernel", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_kernel(void) { return PyModule_Create(&module); }
