/* The routed experts of a sparse MLP. */
#ifndef SS_MOE_H
#define SS_MOE_H

#include "weight.h"

#define MOE_MAX_ACTIVE 64

/* A layer's experts; the same struct is in experts.py. */
typedef struct {
  const weight_t *const *gate_up; /* [num_experts]: rows gate, up */
  const weight_t *const *down; /* [num_experts] */
  int32_t num_experts, num_active;
} moe_layer;

/* out = residual + sigmoid(shared gate) * shared + the best experts of x, by their share of the scores.
 * x, residual, shared, out: [tokens, hidden]; scores: [tokens, lds], the experts' and then the shared gate.
 * out may be residual. */
void ss_moe(const moe_layer *layer, const float *x, const float *scores, int64_t lds, const float *shared,
            const float *residual, int tokens, float *out);

#endif
