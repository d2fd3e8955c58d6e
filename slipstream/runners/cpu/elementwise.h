/* Row-wise operations. */
#ifndef SS_ELEMENTWISE_H
#define SS_ELEMENTWISE_H

#include <stdint.h>

#define MAX_HEAD_DIM 256

/* Arguments of ss_rope_store; the same struct is declared in bindings.py. */
typedef struct {
  const float *qkv; /* [num_tokens, num_heads + 2 num_kv_heads, dim], ldx floats from token to token */
  float *q_out; /* [num_tokens, num_heads, dim] */
  void *k_cache, *v_cache; /* floats, [blocks, num_kv_heads, block_size, dim]; coded: see kv_codes.h */
  const int32_t *positions, *rope_positions, *token_slot; /* [num_tokens]: in the cache, of the rotation, slots */
  const int32_t *block_table; /* [slots, max_blocks] */
  const float *cos, *sin; /* [max positions, rot / 2] */
  const float *q_norm, *k_norm; /* [dim] or NULL */
  int64_t ldx;
  int32_t num_tokens, num_heads, num_kv_heads, dim, rot, block_size, max_blocks, per_chunk, coded;
  float eps;
} rope_job;

void ss_rms_norm(const float *x, const float *w, float eps, int rows, int cols, float *out);
void ss_silu_mul(const float *x, int rows, int cols, float *out);
/* x *= sigmoid(gate); gate: ldg floats from row to row. */
void ss_sigmoid_mul(const float *gate, int64_t ldg, int rows, int cols, float *x);
void ss_rope_store(rope_job *r);

#endif
