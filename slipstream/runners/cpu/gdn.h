/* Gated DeltaNet on a ragged batch. */
#ifndef SS_GDN_H
#define SS_GDN_H

#include <stdint.h>

#define GDN_MAX_DIM 256 /* of a head */
#define GDN_MAX_KERNEL 8
#define GDN_MAX_DRAFTS 64 /* of a row in a step */

#define GDN_MAX_KEEPS 4 /* of a row in a step */

/* What a row feeds: replayed drafts from its tape, then committed tokens, then drafts. State and window after the first
 * keep_at[i] of the replayed and committed tokens are copied to slot keep_slot[i]. The same struct is in gdn.py. */
typedef struct {
  int32_t slot, offset, num_committed, num_drafts, num_replay, num_keeps;
  int32_t keep_at[GDN_MAX_KEEPS], keep_slot[GDN_MAX_KEEPS];
} gdn_row;

/* A layer's weights and caches; the same struct is in gdn.py. */
typedef struct {
  const float *conv; /* [kernel, channels] */
  const float *decay_scale, *dt_bias; /* [num_v_heads] */
  const float *norm; /* [v_dim] */
  float *state; /* [slots, num_v_heads, k_dim, v_dim]: after the last committed token */
  float *window; /* [slots, kernel - 1, channels]: conv inputs before the next token */
  float *tape_conv; /* [slots, depth, channels]: raw conv inputs of the last step's drafts */
  float *tape_gates; /* [slots, depth, 2, num_v_heads]: their log decay and beta */
  int32_t num_k_heads, num_v_heads, k_dim, v_dim, kernel, depth;
  int32_t tiled; /* the key head of a value head: head % num_k_heads, instead of head / (num_v_heads / num_k_heads) */
  float eps;
} gdn_layer;

/* x: [tokens, ldx], each conv channels (q, k, v), z, b, a; out: [tokens, num_v_heads * v_dim], normed and gated. */
void ss_gdn(const gdn_layer *layer, const float *x, int64_t ldx, const gdn_row *rows, int num_rows, float *out);

#endif
