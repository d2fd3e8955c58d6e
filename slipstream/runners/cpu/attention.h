/* Causal attention over paged keys and values. */
#ifndef SS_ATTENTION_H
#define SS_ATTENTION_H

#include <stdint.h>

/* Arguments of ss_attend; the same struct is declared in bindings.py. */
typedef struct {
  const float *q; /* [num_tokens, num_heads, dim] */
  const void *k_cache, *v_cache; /* floats, [blocks, num_kv_heads, block_size, dim]; coded: see kv_codes.h */
  const int32_t *positions, *token_slot; /* [num_tokens] */
  const int32_t *block_table; /* [slots, max_blocks] */
  float *out; /* [num_tokens, num_heads, dim] */
  int32_t num_tokens, num_heads, num_kv_heads, dim, block_size, max_blocks, coded;
  float scale;
} attend_args;

void ss_attend(const attend_args *a);

#endif
