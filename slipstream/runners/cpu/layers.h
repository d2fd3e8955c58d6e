/* A stack of decoder layers in one call: norm, attention or recurrence, norm, MLP, both added to the residual stream. */
#ifndef SS_LAYERS_H
#define SS_LAYERS_H

#include <stdint.h>

#include "gdn.h"
#include "moe.h"
#include "weight.h"

/* One layer; the same struct is declared in layers.py. */
typedef struct {
  const float *mixer_norm, *mlp_norm; /* [hidden] */
  const weight_t *entry, *out; /* around attention or recurrence */
  const weight_t *gate_up, *down; /* the dense MLP, or the shared expert */
  const weight_t *router; /* rows: experts, the shared expert's gate; NULL: dense */
  const float *entry_bias, *out_bias; /* or NULL */
  const float *q_norm, *k_norm; /* [dim], or NULL */
  void *k_cache, *v_cache; /* as ss_attend takes them; NULL: recurrence */
  const gdn_layer *gdn; /* NULL: attention */
  const moe_layer *moe; /* NULL: dense */
} layer_t;

/* What all layers share in a step. */
typedef struct {
  float *x; /* [num_tokens, hidden], in and out */
  const int32_t *positions, *rope_positions, *token_slot; /* [num_tokens] */
  const int32_t *block_table; /* [slots, max_blocks] */
  const float *cos, *sin; /* [max positions, rot / 2] */
  const gdn_row *rows; /* [num_rows] */
  int32_t num_tokens, num_rows, num_heads, num_kv_heads, dim, rot, block_size, max_blocks, coded_kv;
  float eps, scale;
} layers_step;

void ss_layers(const layer_t *layers, int num_layers, const layers_step *step);

#endif
