/* What Python sees. Arrays are told by address and number of entries, as backbones import no NumPy. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "gelu.h"
#include "share.h"

typedef struct {
    char *out, *given, *slopes; /* given x, or its gradient */
    int is_half;
} Gelu;

static void forward(void *on, size_t start, size_t end, size_t part) {
    const Gelu *g = on;
    size_t size = g->is_half ? 2 : 4;
    nestling_gelu(g->out + start * size, g->slopes + start * size, g->given + start * size, end - start, g->is_half);
}

static void backward(void *on, size_t start, size_t end, size_t part) {
    const Gelu *g = on;
    nestling_gelu_backward((uint16_t *)g->out + start, (uint16_t *)g->given + start, (int16_t *)g->slopes + start,
                           end - start);
}

static void *at(unsigned long long address) { return (void *)(uintptr_t)address; }

static PyObject *gelu(PyObject *self, PyObject *arguments) {
    unsigned long long out, x, slopes;
    Py_ssize_t number, threads;
    int is_half;
    if (!PyArg_ParseTuple(arguments, "KKKnpn", &out, &x, &slopes, &number, &is_half, &threads)) return NULL;
    Gelu given = {at(out), at(x), at(slopes), is_half};
    Py_BEGIN_ALLOW_THREADS;
    nestling_share(forward, &given, number, threads);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *gelu_backward(PyObject *self, PyObject *arguments) {
    unsigned long long out, gradient, slopes;
    Py_ssize_t number, threads;
    if (!PyArg_ParseTuple(arguments, "KKKnn", &out, &gradient, &slopes, &number, &threads)) return NULL;
    Gelu given = {at(out), at(gradient), at(slopes), 1};
    Py_BEGIN_ALLOW_THREADS;
    nestling_share(backward, &given, number, threads);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"use_threads", nestling_use_threads, METH_O, "use_threads(address)"},
                                {"gelu", gelu, METH_VARARGS, "gelu(out, x, slopes, number, is_half, threads)"},
                                {"gelu_backward", gelu_backward, METH_VARARGS,
                                 "gelu_backward(out, gradient, slopes, number, threads)"},
                                {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kernel", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_kernel(void) { return PyModule_Create(&module); }
