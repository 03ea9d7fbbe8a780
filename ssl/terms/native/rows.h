/* A row of logits at a time: softmax, log-sum-exp, and what the loss and its gradient are made of.

The same as pairs.py and targets.py, which say where it comes from. A row is gone through twice, in chunks that
stay in the nearest cache: exponentials of each chunk less its own maximum, then the factor of that chunk. As
a * b + c is not contracted and sums run in fixed lanes, all processors give the same bits. What is not finite
makes its whole row NaN, as in torch.

Shapes used below: K entries of a row.
*/

#include <stddef.h>

#define CHUNK 1024

/* (K,), or a chunk of one number that stands for all of them: step 0. */
typedef struct {
    const float *at;
    size_t step;
} Row;

/* (K,), of fp32, or of bf16, which is the upper half of it. */
typedef struct {
    void *at;
    int is_half;
} Entries;

/* Of a chunk: its maximum, the sum of exponentials e = exp(x - top), and <e, x - top>. */
typedef struct {
    double top, sum, slope;
} Part;

static inline size_t nestling_parts(size_t k) { return (k + CHUNK - 1) / CHUNK; }

/* The sum of `count` rows that lie `stride` floats apart, times `weight`, without the row `but`. */
void nestling_seen(float *out, const float *rows, size_t stride, int count, int but, float weight, size_t k);

/* weight * logsumexp(x) + <x, seen>, where x = slope * logits. `gradient`, which may be `logits` or nowhere, becomes
   (seen + weight * softmax(x)) * rescale. `memory` is of K entries, for a gradient of bf16. */
double nestling_compare(Entries gradient, Entries logits, Row slope, const float *seen, Row rescale, double weight,
                        Part *parts, float *memory, size_t k);

/* q = softmax(bias + slope * logits): its entropy, and the first of its largest entries. */
double nestling_target(float *q, Entries logits, Row bias, Row slope, Part *parts, size_t k, size_t *winner);

/* total += n entries of the row from `at` on. */
void nestling_add(float *total, Entries row, size_t at, size_t n);
