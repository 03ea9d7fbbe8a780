/* GELU (Hendrycks and Gimpel, 2016): x Phi(x), Phi being the normal distribution's function.

n numbers of fp32, or of bf16, which are computed in fp32 and rounded once. Slopes, Phi(x) + x phi(x) with the density
phi, are fp32, or int16 steps of 2^-14 for bf16: they lie between -0.13 and 1.13.
*/

#include <stddef.h>
#include <stdint.h>

void nestling_gelu(void *out, void *slopes, const void *x, size_t n, int is_half);

/* out = gradient * slopes, of bf16. */
void nestling_gelu_backward(uint16_t *out, const uint16_t *gradient, const int16_t *slopes, size_t n);
