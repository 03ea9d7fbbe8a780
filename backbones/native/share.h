/* Work shared among torch's own threads.

Those of another pool would have to share the processors with torch's, which look out for work for some
milliseconds after each operation of torch's: two threads then took as long as one.
*/

#include <Python.h>
#include <stddef.h>

/* Called for a range of what there is to do, and with the number of that range. */
typedef void (*Work)(void *on, size_t start, size_t end, size_t part);

/* A module's use_threads(address): that of GOMP_parallel, by which OpenMP's libraries let functions run in all
   threads. */
PyObject *nestling_use_threads(PyObject *module, PyObject *address);

/* All of `number` in that many ranges; in this thread alone where no other ones are known. */
void nestling_share(Work work, void *on, size_t number, size_t parts);
