/* What Python sees; it checks that all lies within its arrays. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <limits.h>
#include <stdint.h>
#include <string.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "../../../backbones/native/share.h"
#include "rows.h"
#include "transpose.h"

#define MOST 6 /* arrays of a call */
#define LARGE_PAGE (2 << 20)

/* Arrays of one call, and what was wrong with them. */
typedef struct {
    Py_buffer held[MOST];
    int count, is_wrong;
} Arrays;

static void release(Arrays *arrays) {
    while (arrays->count > 0) PyBuffer_Release(&arrays->held[--arrays->count]);
}

/* Rows of logits are fp32 or bf16, which Python sees as uint16. */
#define ROWS "fH"

/* An array of one of these types and that number of dimensions, whose last one is contiguous. */
static Py_buffer *taken(Arrays *arrays, PyObject *object, const char *types, int dimensions, int is_written) {
    Py_buffer *array = &arrays->held[arrays->count];
    if (arrays->is_wrong || PyObject_GetBuffer(object, array, PyBUF_STRIDES | PyBUF_FORMAT |
                                                                  (is_written ? PyBUF_WRITABLE : 0)) < 0) {
        arrays->is_wrong = 1;
        return NULL;
    }
    arrays->count++;
    arrays->is_wrong = array->ndim != dimensions || strlen(array->format) != 1 || !strchr(types, *array->format) ||
                       array->strides[dimensions - 1] != array->itemsize;
    for (int d = 0; d < dimensions; d++) arrays->is_wrong |= array->strides[d] % array->itemsize != 0;
    return arrays->is_wrong ? NULL : array;
}

static int are_alike(const Py_buffer *a, const Py_buffer *b) {
    return memcmp(a->shape, b->shape, sizeof(Py_ssize_t) * a->ndim) == 0;
}

static void *row_of(const Py_buffer *rows, Py_ssize_t view, Py_ssize_t image) {
    return (char *)rows->buf + view * rows->strides[0] + image * rows->strides[1];
}

static Entries entries_of(const Py_buffer *rows, Py_ssize_t view, Py_ssize_t image) {
    return (Entries){row_of(rows, view, image), *rows->format == 'H'};
}

/* (K,), or one number, for which `chunk` is filled. */
static Row spread(Arrays *arrays, const Py_buffer *array, Py_ssize_t k, float *chunk) {
    Row row = {array->buf, 1};
    if (array->shape[0] == k) return row;
    if (array->shape[0] != 1) arrays->is_wrong = 1;
    for (int i = 0; i < CHUNK && !arrays->is_wrong; i++) chunk[i] = *(float *)array->buf;
    return (Row){chunk, 0};
}

static PyObject *refused(Arrays *arrays) {
    release(arrays);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "an array has another type or shape than the others ask");
    return NULL;
}

typedef struct {
    const Py_buffer *logits, *q, *told;
    Row bias, slope;
    Part *parts; /* of each thread */
} Teacher;

static void make_targets(void *on, size_t start, size_t end, size_t part) {
    const Teacher *t = on;
    Py_ssize_t views = t->logits->shape[0], k = t->logits->shape[2];
    for (Py_ssize_t image = start; image < (Py_ssize_t)end; image++)
        for (Py_ssize_t view = 0; view < views; view++) {
            size_t winner = 0;
            double *of_row = row_of(t->told, view, image);
            of_row[0] = nestling_target(row_of(t->q, view, image), entries_of(t->logits, view, image), t->bias,
                                        t->slope, t->parts + part * nestling_parts(k), k, &winner);
            of_row[1] = (double)winner;
        }
}

static PyObject *targets(PyObject *self, PyObject *arguments) {
    PyObject *objects[5];
    int threads;
    float biases[CHUNK], slopes[CHUNK];
    Arrays arrays = {.count = 0};
    Teacher teacher = {0};
    if (!PyArg_ParseTuple(arguments, "OOOOOi", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4],
                          &threads))
        return NULL;
    Py_buffer *logits = taken(&arrays, objects[0], ROWS, 3, 0), *bias = taken(&arrays, objects[1], "f", 1, 0);
    Py_buffer *slope = taken(&arrays, objects[2], "f", 1, 0), *q = taken(&arrays, objects[3], "f", 3, 1);
    Py_buffer *told = taken(&arrays, objects[4], "d", 3, 1);
    if (arrays.is_wrong) return refused(&arrays);
    Py_ssize_t views = logits->shape[0], images = logits->shape[1], k = logits->shape[2];
    teacher = (Teacher){logits, q, told, spread(&arrays, bias, k, biases), spread(&arrays, slope, k, slopes), NULL};
    if (arrays.is_wrong || k < 1 || threads < 1 || !are_alike(q, logits) || told->shape[0] != views ||
        told->shape[1] != images || told->shape[2] != 2)
        return refused(&arrays);
    teacher.parts = PyMem_RawMalloc(sizeof(Part) * nestling_parts(k) * threads);
    if (teacher.parts) {
        Py_BEGIN_ALLOW_THREADS;
        nestling_share(make_targets, &teacher, images, threads);
        Py_END_ALLOW_THREADS;
    }
    PyMem_RawFree(teacher.parts);
    release(&arrays);
    if (!teacher.parts) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

typedef struct {
    const Py_buffer *total, *rows;
} Sum;

/* Of a range of chunks. */
static void add_columns(void *on, size_t start, size_t end, size_t part) {
    const Sum *s = on;
    size_t k = s->total->shape[0];
    for (size_t at = start * CHUNK; at < k && at < end * CHUNK; at += CHUNK)
        for (Py_ssize_t view = 0; view < s->rows->shape[0]; view++)
            for (Py_ssize_t image = 0; image < s->rows->shape[1]; image++)
                nestling_add((float *)s->total->buf + at, entries_of(s->rows, view, image), at,
                             k - at < CHUNK ? k - at : CHUNK);
}

static PyObject *add_rows(PyObject *self, PyObject *arguments) {
    PyObject *of_total, *of_rows;
    int threads;
    Arrays arrays = {.count = 0};
    if (!PyArg_ParseTuple(arguments, "OOi", &of_total, &of_rows, &threads)) return NULL;
    Sum sum = {taken(&arrays, of_total, "f", 1, 1), taken(&arrays, of_rows, ROWS, 3, 0)};
    if (arrays.is_wrong || threads < 1 || sum.rows->shape[2] != sum.total->shape[0]) return refused(&arrays);
    Py_BEGIN_ALLOW_THREADS;
    nestling_share(add_columns, &sum, nestling_parts(sum.total->shape[0]), threads);
    Py_END_ALLOW_THREADS;
    release(&arrays);
    Py_RETURN_NONE;
}

typedef struct {
    const Py_buffer *out, *rows;
} Turn;

/* Of a range of strips. */
static void turn(void *on, size_t start, size_t end, size_t part) {
    const Turn *t = on;
    size_t rows = t->rows->shape[0], columns = t->rows->shape[1], from = start * STRIP, to = end * STRIP;
    size_t stride = t->rows->strides[0] / t->rows->itemsize;
    if (to > columns) to = columns;
    if (t->rows->itemsize == sizeof(float))
        nestling_transpose((float *)t->out->buf + from * rows, (float *)t->rows->buf + from, rows, to - from, stride);
    else
        nestling_transpose_halves((uint16_t *)t->out->buf + from * rows, (uint16_t *)t->rows->buf + from, rows,
                                  to - from, stride);
}

static PyObject *transpose(PyObject *self, PyObject *arguments) {
    PyObject *of_out, *of_rows;
    int threads;
    Arrays arrays = {.count = 0};
    if (!PyArg_ParseTuple(arguments, "OOi", &of_out, &of_rows, &threads)) return NULL;
    Turn given = {taken(&arrays, of_out, ROWS, 2, 1), taken(&arrays, of_rows, ROWS, 2, 0)};
    if (arrays.is_wrong || threads < 1 || given.out->itemsize != given.rows->itemsize || given.out->shape[0] != given.rows->shape[1] ||
        given.out->shape[1] != given.rows->shape[0] || given.rows->strides[0] < 0 ||
        given.out->strides[0] != given.out->shape[1] * given.out->itemsize)
        return refused(&arrays);
    Py_BEGIN_ALLOW_THREADS;
    nestling_share(turn, &given, (given.rows->shape[1] + STRIP - 1) / STRIP, threads);
    Py_END_ALLOW_THREADS;
    release(&arrays);
    Py_RETURN_NONE;
}

typedef struct {
    Py_buffer *logits, *gradients, *targets, *losses;
    Row slope, rescale;
    int first;
    double weight;
    float *rows; /* two of each thread */
    Part *parts;
} Views;

/* Image by image, so that its targets are near. The sum over all targets is the same for all local views. */
static void compare_views(void *on, size_t start, size_t end, size_t part) {
    const Views *v = on;
    Py_ssize_t views = v->logits->shape[0], k = v->logits->shape[2];
    int num_targets = (int)v->targets->shape[0];
    float *seen = v->rows + 2 * part * k, *memory = seen + k;
    Part *parts = v->parts + part * nestling_parts(k);
    for (Py_ssize_t image = start; image < (Py_ssize_t)end; image++) {
        double loss = 0;
        for (Py_ssize_t view = 0; view < views; view++) {
            Py_ssize_t own = v->first + view;
            if (own <= num_targets || view == 0)
                nestling_seen(seen, row_of(v->targets, 0, image), v->targets->strides[0] / (Py_ssize_t)sizeof(float),
                              num_targets, own < num_targets ? (int)own : -1, (float)-v->weight, k);
            Entries gradient = v->gradients ? entries_of(v->gradients, view, image) : (Entries){NULL, 0};
            loss += nestling_compare(gradient, entries_of(v->logits, view, image), v->slope, seen, v->rescale,
                                     v->weight * (num_targets - (own < num_targets)), parts, memory, k);
        }
        *(double *)((char *)v->losses->buf + image * v->losses->strides[0]) += loss;
    }
}

static PyObject *compare(PyObject *self, PyObject *arguments) {
    PyObject *objects[6];
    int threads;
    float slopes[CHUNK], rescales[CHUNK], one = 1;
    Arrays arrays = {.count = 0};
    Views views = {0};
    if (!PyArg_ParseTuple(arguments, "OOOOOOidi", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4],
                          &objects[5], &views.first, &views.weight, &threads))
        return NULL;
    views.logits = taken(&arrays, objects[0], ROWS, 3, 0);
    views.targets = taken(&arrays, objects[2], "f", 3, 0);
    views.losses = taken(&arrays, objects[5], "d", 1, 1);
    Py_buffer *slope = taken(&arrays, objects[3], "f", 1, 0), *rescale = NULL;
    if (objects[1] != Py_None) views.gradients = taken(&arrays, objects[1], ROWS, 3, 1);
    if (arrays.is_wrong) return refused(&arrays);
    Py_ssize_t k = views.logits->shape[2], images = views.logits->shape[1];
    views.slope = spread(&arrays, slope, k, slopes);
    Py_ssize_t unit = 1;
    Py_buffer ones = {.buf = &one, .shape = &unit};
    if (objects[4] != Py_None) rescale = taken(&arrays, objects[4], "f", 1, 0);
    if (!arrays.is_wrong) views.rescale = spread(&arrays, rescale ? rescale : &ones, k, rescales);
    if (arrays.is_wrong || k < 1 || threads < 1 || views.first < 0 || views.targets->shape[0] > INT_MAX ||
        views.targets->shape[1] != images || views.targets->shape[2] != k || views.losses->shape[0] != images ||
        (views.gradients && !are_alike(views.gradients, views.logits)))
        return refused(&arrays);
    views.rows = PyMem_RawMalloc(sizeof(float) * 2 * k * threads);
    views.parts = PyMem_RawMalloc(sizeof(Part) * nestling_parts(k) * threads);
    int done = views.rows && views.parts;
    if (done) {
        Py_BEGIN_ALLOW_THREADS;
        nestling_share(compare_views, &views, images, threads);
        Py_END_ALLOW_THREADS;
    }
    PyMem_RawFree(views.rows);
    PyMem_RawFree(views.parts);
    release(&arrays);
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* New memory is filled with zeros page by page when it is first written, which takes as long as the loss where
   pages are small. Threads that write the same page wait for each other: for those it is filled here. */
static PyObject *use_large_pages(PyObject *self, PyObject *arguments) {
    PyObject *object;
    Py_buffer array;
    int is_filled;
    if (!PyArg_ParseTuple(arguments, "Op", &object, &is_filled)) return NULL;
    if (PyObject_GetBuffer(object, &array, PyBUF_WRITABLE) < 0) return NULL;
#if defined(MADV_HUGEPAGE)
    uintptr_t start = ((uintptr_t)array.buf + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
    uintptr_t end = ((uintptr_t)array.buf + array.len) / LARGE_PAGE * LARGE_PAGE;
    if (start < end) madvise((void *)start, end - start, MADV_HUGEPAGE); /* a wish, which may be refused */
#if defined(MADV_POPULATE_WRITE)
    if (start < end && is_filled) madvise((void *)start, end - start, MADV_POPULATE_WRITE); /* from Linux 5.14 */
#endif
#endif
    PyBuffer_Release(&array);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"use_threads", nestling_use_threads, METH_O, "use_threads(address)"},
    {"use_large_pages", use_large_pages, METH_VARARGS, "use_large_pages(array, is_filled)"},
    {"targets", targets, METH_VARARGS, "targets(logits, bias, slope, q, told, threads)"},
    {"add_rows", add_rows, METH_VARARGS, "add_rows(total, rows, threads)"},
    {"transpose", transpose, METH_VARARGS, "transpose(out, rows, threads)"},
    {"compare", compare, METH_VARARGS,
     "compare(logits, gradients, targets, slope, rescale, losses, first, weight, threads)"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kernel", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_kernel(void) { return PyModule_Create(&module); }
