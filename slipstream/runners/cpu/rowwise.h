/* Norms and activations of one row, shared by elementwise.c and gdn.c. */
#ifndef SS_ROWWISE_H
#define SS_ROWWISE_H

#include <math.h>

#include "simd.h"

INLINE float sum_squares(const float *x, int n) {
  vf a = v_set(0.0f), b = a;
  int i = 0;
  for (; i + 2 * VL <= n; i += 2 * VL) {
    vf u = v_load(x + i), v = v_load(x + i + VL);
    a = v_fma(u, u, a);
    b = v_fma(v, v, b);
  }
  float total = v_sum(v_add(a, b));
  for (; i < n; i++) total += x[i] * x[i];
  return total;
}

INLINE void norm_row(const float *x, const float *w, float eps, int n, float *out) {
  float scale = 1.0f / sqrtf(sum_squares(x, n) / (float)n + eps);
  vf s = v_set(scale);
  int i = 0;
  for (; i + VL <= n; i += VL) v_store(out + i, v_mul(v_mul(v_load(x + i), s), v_load(w + i)));
  for (; i < n; i++) out[i] = x[i] * scale * w[i];
}

INLINE vf v_sigmoid(vf x) {
  vf one = v_set(1.0f);
  return v_div(one, v_add(one, v_exp(v_sub(v_set(0.0f), x))));
}

INLINE vf v_silu(vf x) { return v_div(x, v_add(v_set(1.0f), v_exp(v_sub(v_set(0.0f), x)))); }

/* n < VL floats of x, the rest zero. */
INLINE vf v_load_part(const float *x, int n) {
  float lanes[VL] = {0};
  memcpy(lanes, x, (size_t)n * 4);
  return v_load(lanes);
}

INLINE void v_store_part(float *x, vf a, int n) {
  float lanes[VL];
  v_store(lanes, a);
  memcpy(x, lanes, (size_t)n * 4);
}

/* out = silu(gate) * up; out may be up. */
INLINE void silu_row(const float *gate, const float *up, int n, float *out) {
  int i = 0;
  for (; i + VL <= n; i += VL) v_store(out + i, v_mul(v_silu(v_load(gate + i)), v_load(up + i)));
  if (i < n) v_store_part(out + i, v_mul(v_silu(v_load_part(gate + i, n - i)), v_load_part(up + i, n - i)), n - i);
}

/* x *= sigmoid(gate). */
INLINE void sigmoid_row(const float *gate, int n, float *x) {
  int i = 0;
  for (; i + VL <= n; i += VL) v_store(x + i, v_mul(v_load(x + i), v_sigmoid(v_load(gate + i))));
  if (i < n) v_store_part(x + i, v_mul(v_load_part(x + i, n - i), v_sigmoid(v_load_part(gate + i, n - i))), n - i);
}

#endif
