/* Matrix products with packed weights. */
#ifndef SS_LINEAR_H
#define SS_LINEAR_H

#include "weight.h"

/* out [m, rows] = x [m, cols] w^T, then + bias [rows], then + add [m, rows]; ld*: floats from row to row.
 * bias and add may be NULL; add may be out itself. */
typedef struct {
  const weight_t *w;
  const float *x;
  float *out;
  const float *bias, *add;
  int64_t ldx, ldo, lda;
  int m;
} linear_call;

/* Independent products, shared by the threads as one job: small ones do not wait for each other. */
void linear_many(const linear_call *calls, int num_calls);

void ss_linear(const weight_t *w, const float *x, int64_t ldx, int m, float *out, int64_t ldo, const float *bias,
               const float *add, int64_t lda);

#endif
