/* Consecutive decoder layers of the Llama kind in one call: between two kernels of a step there is then no Python.
 * Calls the same kernels as the single operations do, so it gives the same bits. */
#include "layers.h"

#include <stdlib.h>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"

/* Activations of one layer, reused by the next. */
typedef struct {
  float *normed, *qkv, *q, *attended, *gate_up, *activated;
} buffers_t;

static buffers_t carve(const layer_t *l, const layers_step *s) {
  static float *memory;
  static int64_t have;
  int64_t t = s->num_tokens, heads = (int64_t)s->num_heads * s->dim, inner = l->down->cols, hidden = l->qkv->cols;
  int64_t need = t * (hidden + l->qkv->rows + 2 * heads + 3 * inner);
  if (need > have) {
    free(memory);
    if (posix_memalign((void **)&memory, 64, (uint64_t)need * sizeof(float))) abort();
    have = need;
  }
  buffers_t b = {.normed = memory};
  b.qkv = b.normed + t * hidden;
  b.q = b.qkv + t * l->qkv->rows;
  b.attended = b.q + t * heads;
  b.gate_up = b.attended + t * heads;
  b.activated = b.gate_up + t * 2 * inner;
  return b;
}

static void attention_half(const layer_t *l, const layers_step *s, const buffers_t *b) {
  int t = s->num_tokens, hidden = l->qkv->cols, width = l->qkv->rows, heads = s->num_heads * s->dim;
  rope_job rope = {b->qkv, b->q, l->k_cache, l->v_cache, s->positions, s->token_slot, s->block_table, s->cos, s->sin,
                   l->q_norm, l->k_norm, width, t, s->num_heads, s->num_kv_heads, s->dim, s->rot, s->block_size,
                   s->max_blocks, 0, s->eps};
  attend_args attend = {b->q, l->k_cache, l->v_cache, s->positions, s->token_slot, s->block_table, b->attended, t,
                        s->num_heads, s->num_kv_heads, s->dim, s->block_size, s->max_blocks, s->scale};
  ss_rms_norm(s->x, l->attention_norm, s->eps, t, hidden, b->normed);
  ss_linear(l->qkv, b->normed, hidden, t, b->qkv, width, l->qkv_bias, NULL, 0);
  ss_rope_store(&rope);
  ss_attend(&attend);
  ss_linear(l->o, b->attended, heads, t, s->x, hidden, l->o_bias, s->x, hidden);
}

static void mlp_half(const layer_t *l, const layers_step *s, const buffers_t *b) {
  int t = s->num_tokens, hidden = l->qkv->cols, inner = l->down->cols;
  ss_rms_norm(s->x, l->mlp_norm, s->eps, t, hidden, b->normed);
  ss_linear(l->gate_up, b->normed, hidden, t, b->gate_up, 2 * inner, NULL, NULL, 0);
  ss_silu_mul(b->gate_up, t, inner, b->activated);
  ss_linear(l->down, b->activated, inner, t, s->x, hidden, NULL, s->x, hidden);
}

void ss_layers(const layer_t *layers, int num_layers, const layers_step *step) {
  for (int i = 0; i < num_layers; i++) {
    buffers_t b = carve(layers + i, step);
    attention_half(layers + i, step, &b);
    mlp_half(layers + i, step, &b);
  }
}
