/* Consecutive decoder layers in one call: between two kernels of a step there is then no Python. Attention, gated or not,
 * or Gated DeltaNet; then a dense MLP or routed experts. Calls the same kernels as the single operations do, so it gives
 * the same bits. */
#include "layers.h"

#include <stdlib.h>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"

/* Activations of one layer, reused by the next. */
typedef struct {
  float *normed, *entry, *q, *mixed, *gate_up, *activated, *scores, *shared;
} buffers_t;

static int64_t mixed_width(const layer_t *l) { return l->out->cols; }

static buffers_t reserve(const layer_t *l, const layers_step *s) {
  static float *memory;
  static int64_t have;
  int64_t t = s->num_tokens, inner = l->down->cols, hidden = l->entry->cols;
  int64_t scores = l->router ? l->router->rows : 0, shared = l->router ? hidden : 0;
  int64_t need = t * (hidden + l->entry->rows + 2 * mixed_width(l) + 3 * inner + scores + shared);
  if (need > have) {
    free(memory);
    if (posix_memalign((void **)&memory, 64, (uint64_t)need * sizeof(float))) abort();
    have = need;
  }
  buffers_t b = {.normed = memory};
  b.entry = b.normed + t * hidden;
  b.q = b.entry + t * l->entry->rows;
  b.mixed = b.q + t * mixed_width(l);
  b.gate_up = b.mixed + t * mixed_width(l);
  b.activated = b.gate_up + t * 2 * inner;
  b.scores = b.activated + t * inner;
  b.shared = b.scores + t * scores;
  return b;
}

/* The entry's columns: queries, keys, values and, where attention is gated, the gate. */
static void attend(const layer_t *l, const layers_step *s, const buffers_t *b) {
  int t = s->num_tokens, width = l->entry->rows, qkv = (s->num_heads + 2 * s->num_kv_heads) * s->dim;
  rope_job rope = {b->entry, b->q, l->k_cache, l->v_cache, s->positions, s->rope_positions, s->token_slot,
                   s->block_table, s->cos, s->sin, l->q_norm, l->k_norm, width, t, s->num_heads, s->num_kv_heads, s->dim, s->rot, s->block_size,
                   s->max_blocks, 0, s->coded_kv, s->eps};
  attend_args args = {b->q, l->k_cache, l->v_cache, s->positions, s->token_slot, s->block_table, b->mixed, t,
                      s->num_heads, s->num_kv_heads, s->dim, s->block_size, s->max_blocks, s->coded_kv,
                      s->scale};
  ss_rope_store(&rope);
  ss_attend(&args);
  if (width > qkv) ss_sigmoid_mul(b->entry + qkv, width, t, s->num_heads * s->dim, b->mixed);
}

static void mix(const layer_t *l, const layers_step *s, const buffers_t *b) {
  int t = s->num_tokens, hidden = l->entry->cols, width = l->entry->rows;
  ss_rms_norm(s->x, l->mixer_norm, s->eps, t, hidden, b->normed);
  ss_linear(l->entry, b->normed, hidden, t, b->entry, width, l->entry_bias, NULL, 0);
  if (l->gdn) ss_gdn(l->gdn, b->entry, width, s->rows, s->num_rows, b->mixed);
  else attend(l, s, b);
  ss_linear(l->out, b->mixed, mixed_width(l), t, s->x, hidden, l->out_bias, s->x, hidden);
}

static void mlp(const layer_t *l, const layers_step *s, const buffers_t *b) {
  int t = s->num_tokens, hidden = l->entry->cols, inner = l->down->cols;
  ss_rms_norm(s->x, l->mlp_norm, s->eps, t, hidden, b->normed);
  ss_linear(l->gate_up, b->normed, hidden, t, b->gate_up, 2 * inner, NULL, NULL, 0);
  ss_silu_mul(b->gate_up, t, inner, b->activated);
  if (!l->moe) {
    ss_linear(l->down, b->activated, inner, t, s->x, hidden, NULL, s->x, hidden);
    return;
  }
  ss_linear(l->down, b->activated, inner, t, b->shared, hidden, NULL, NULL, 0);
  ss_linear(l->router, b->normed, hidden, t, b->scores, l->router->rows, NULL, NULL, 0);
  ss_moe(l->moe, b->normed, b->scores, l->router->rows, b->shared, s->x, t, s->x);
}

void ss_layers(const layer_t *layers, int num_layers, const layers_step *step) {
  for (int i = 0; i < num_layers; i++) {
    buffers_t b = reserve(layers + i, step);
    mix(layers + i, step, &b);
    mlp(layers + i, step, &b);
  }
}
