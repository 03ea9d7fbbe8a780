#define PY_SSIZE_T_CLEAN
#include "share.h"

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

typedef struct {
    Work work;
    void *on;
    size_t number, parts, next;
} Shared;

static void do_part(const Shared *s, size_t part) {
    s->work(s->on, s->number * part / s->parts, s->number * (part + 1) / s->parts, part);
}

static Parallel in_all_threads;

PyObject *nestling_use_threads(PyObject *module, PyObject *address) {
    void *of_parallel = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred()) return NULL;
    in_all_threads = (Parallel)of_parallel;
    Py_RETURN_NONE;
}

#if defined(__GNUC__)

static void take_parts(void *shared) {
    Shared *s = shared;
    for (size_t part; (part = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED)) < s->parts;) do_part(s, part);
}

static int is_done_by_all(Shared *shared) {
    if (!in_all_threads || shared->parts < 2) return 0;
    in_all_threads(take_parts, shared, 0, 0); /* in fewer it would end the others, to be made again later */
    return 1;
}

#else /* torch's OpenMP has no such function there */

static int is_done_by_all(Shared *shared) { return 0; }

#endif

void nestling_share(Work work, void *on, size_t number, size_t parts) {
    Shared shared = {work, on, number, parts, 0};
    if (is_done_by_all(&shared)) return;
    for (size_t part = 0; part < parts; part++) do_part(&shared, part);
}
