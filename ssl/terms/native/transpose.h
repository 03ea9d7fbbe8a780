/* Rows of logits' gradients as columns, as the product for the weight's gradient takes them fastest. */

#include <stddef.h>
#include <stdint.h>

#define STRIP 16 /* columns that are turned together: a line of the cache */

/* out (columns, rows) = x^T for `columns` columns of x (rows, ...), whose rows lie `stride` numbers apart. */
void nestling_transpose(float *out, const float *x, size_t rows, size_t columns, size_t stride);
void nestling_transpose_halves(uint16_t *out, const uint16_t *x, size_t rows, size_t columns, size_t stride);
