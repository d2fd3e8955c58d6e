/* What the integer tiles share (tile_dot.h: bytes, tile_word.h: 16-bit words, tile_amx.h: the matrix unit): x in 15 bits.
 *
 * x is quantized block by block: x[k] = step v[k], |v| <= 127 * 128. The weights' u are integers already, so a group's sum of
 * u[k] v[k] is exact; it is rounded once, when it becomes a float. All tiles do the same float operations in the same order:
 *
 *     for each group of 32 columns, or of 16:  t = sum over k of (u[k] - offset) v[k], an integer
 *                                              acc = scale (step t) + acc
 *                                              acc = minimum (step sum(v in group)) + acc     (formats with minima)
 *
 * The quantization error of x (2^-15 of the block's largest) is far below that of the weights.
 */
#ifndef SS_TILE_INTEGER_H
#define SS_TILE_INTEGER_H

#include "tile.h"

#define PARTS_BYTES (2 * BLOCK) /* of a row's block: high and low bytes, or words */
#define TOP (127 * 128)

#if defined(HAS_DOT) || defined(HAS_WORD)

/* x lies in groups of MAX_MT rows, as a tile takes them: for each block the high bytes of its rows, then the low; where
 * words are multiplied, the words of its rows. */
INLINE int8_t *parts_of(int8_t *parts, int blocks, int row, int b) {
  return parts + ((int64_t)(row / MAX_MT) * blocks + b) * MAX_MT * PARTS_BYTES;
}

/* Four bytes, or two words. */
INLINE int32_t word_at(const void *parts, int i) {
  int32_t word;
  memcpy(&word, (const int8_t *)parts + 4 * i, 4);
  return word;
}

/* One block of x: v[0..31], and what the tiles need of it. */
INLINE void quantize_block(const float *x, int32_t *v, x_block *block) {
  vf largest = v_set(0.0f);
  for (int i = 0; i < BLOCK; i += VL) largest = v_max(largest, v_max(v_load(x + i), v_sub(v_set(0.0f), v_load(x + i))));
  float top = v_hmax(largest);
  vf scale = v_set(top > 1e-30f ? TOP / top : 0.0f);
  for (int i = 0; i < BLOCK; i += VL) vi_store(v + i, v_round(v_mul(v_load(x + i), scale)));
  int32_t first = 0, second = 0;
  for (int k = 0; k < BLOCK / 2; k++) first += v[k];
  for (int k = BLOCK / 2; k < BLOCK; k++) second += v[k];
  block->step = top > 1e-30f ? top / TOP : 0.0f;
  block->total[0] = first, block->total[1] = second, block->total[WHOLE] = first + second;
  for (int i = 0; i < NUM_SUMS; i++) block->sum[i] = block->step * (float)block->total[i];
}

/* Where an integer sum starts, so that the offset is taken off. */
INLINE vi start_of(int format, const x_block *x, int which) { return vi_set(-offset_of(format) * x->total[which]); }

/* acc and the share of one group whose integer sum is t. */
INLINE vf add_dot(vf d, vi t, const x_block *x, vf acc) { return v_fma(d, v_mul(v_set(x->step), v_from_int(t)), acc); }

#endif
#endif
