/* What the integer tiles share (tile_dot.h: bytes, tile_word.h: 16-bit words, tile_amx.h: the matrix unit): x in 15 bits.
 *
 * x is quantized block by block: x[k] = step v[k], |v| <= 127 * 128. The weights' u are integers already, so a group's sum of
 * u[k] v[k] is exact; it is rounded once, when it becomes a float. All tiles do the same float operations in the same order:
 *
 *     for each group of 32 columns, or of 16:  t = sum over k of (u[k] - offset) v[k], an integer
 *                                              acc = scale (step t) + acc
 *     then, in formats with minima, again:     acc = minimum (step sum(v in group)) + acc
 *
 * CODES6 has groups of 16 columns, and factors small enough to multiply the codes: u - offset and factor have 13 bits together,
 * so that t = sum over k of (u[k] - offset) factor v[k] over 32 columns still is a 32-bit integer. Its scale is the step.
 *
 * The quantization error of x (2^-15 of the block's largest) is far below that of the weights.
 */
#ifndef SS_TILE_INTEGER_H
#define SS_TILE_INTEGER_H

#include "tile.h"

#define PARTS_BYTES (2 * BLOCK) /* of a row's block: high and low bytes, or words */
#define TOP (127 * 128)

#ifdef HAS_WORDS

/* x lies in groups of MAX_MT rows, as a tile takes them: for each block the high bytes of its rows, then the low; or, where
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

/* Words of v[0..31] in the order of the lanes' pairs: of each 8 columns 0 4, 2 6, 1 5, 3 7. */
INLINE void store_words(const int32_t *v, int16_t *to) {
  static const int order[8] = {0, 4, 2, 6, 1, 5, 3, 7};
  for (int k = 0; k < BLOCK; k += 8)
    for (int i = 0; i < 8; i++) to[k + i] = (int16_t)v[k + order[i]];
}

/* Bytes of v[0..31] in the order of the words. */
INLINE void store_bytes(const int32_t *v, int8_t *to) {
#if VL == 16
  const __m256i order = _mm256_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10,
                                         12, 14, 9, 11, 13, 15);
  __m128i a = _mm512_cvtepi32_epi8(vi_load(v)), b = _mm512_cvtepi32_epi8(vi_load(v + 16));
  _mm256_storeu_si256((__m256i *)to, _mm256_shuffle_epi8(_mm256_set_m128i(b, a), order));
#elif VL == 8
  const __m256i order = _mm256_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10,
                                         12, 14, 9, 11, 13, 15);
  const vi a = _mm256_packs_epi32(vi_load(v), vi_load(v + 8)), b = _mm256_packs_epi32(vi_load(v + 16), vi_load(v + 24));
  const vi fours = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  vi_store(to, _mm256_shuffle_epi8(fours, order));
#else
  for (int k = 0; k < BLOCK; k++) to[(k / 8) * 8 + (k % 2) * 4 + (k % 8) / 2] = (int8_t)v[k];
#endif
}

/* The high and the low bytes of v[0..31]. */
INLINE void split_bytes(const int32_t *v, int8_t *high_at, int8_t *low_at) {
  int32_t high[BLOCK], low[BLOCK];
  for (int i = 0; i < BLOCK; i += VL) {
    vi h = vi_sra(vi_add(vi_load(v + i), vi_set(64)), 7);
    vi_store(high + i, h);
    vi_store(low + i, vi_sub(vi_load(v + i), vi_shl(h, 7)));
  }
  store_bytes(high, high_at);
  store_bytes(low, low_at);
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

/* The same for rows from .. to - 1 and all vectors of a panel. */
INLINE void add_dots(const int from, const int to, const scales_t *s, int half, vi t[][NUM_GROUPS], const x_block *x, int blocks,
                     sums_t acc) {
  _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++)
    _Pragma("GCC unroll 8") for (int m = from; m < to; m++)
      acc[m][g] = add_dot(s->scale[half][g], t[m - from][g], x + (int64_t)m * blocks, acc[m][g]);
}

/* A half's sums times their factors, added to those of the half before: FOLDS(kind), where factors multiply sums. */
INLINE void add_folded(const int from, const int to, const scales_t *s, const int half, vi t[][NUM_GROUPS],
                       vi folded_sum[][NUM_GROUPS]) {
  _Pragma("GCC unroll 4") for (int m = 0; m < to - from; m++)
    _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
      const vi share = vi_mul(t[m][g], vi_sra(s->factor[half][g], 16));
      folded_sum[m][g] = half ? vi_add(folded_sum[m][g], share) : share;
    }
}

/* The minima's share, when all blocks have been added: then the sums are in registers for all of it. */
INLINE void add_minima_of(const linear_job *j, int format, const int mt, int panel, int row, sums_t acc) {
  const int blocks = num_blocks(j->w->cols), halves = num_halves(format);
  const x_block *x = j->x_blocks + (int64_t)row * blocks;
  place_t at = first_block(j->w, panel);
  sums_t sum;
  _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++)
    _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) sum[m][g] = acc[m][g];
  for (int b = 0; b < blocks; next_block(format, ++b, &at), x++)
    for (int half = 0; half < halves; half++) {
      const int which = halves == 2 ? half : WHOLE;
      vf low[NUM_GROUPS];
      _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++)
        low[g] = load_minimum(format, at.header, at.factors, half, g * VL);
      _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++) {
        const vf total = v_set(x[(int64_t)m * blocks].sum[which]);
        _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) sum[m][g] = v_fma(low[g], total, sum[m][g]);
      }
    }
  _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++)
    _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) acc[m][g] = sum[m][g];
}

/* For K-quants the compiler knows the flags. */
#define K_MINIMA (HAS_FACTOR | HAS_MINIMUM | HAS_MINIMUM_FACTOR | 3 << SPAN_SHIFT)
INLINE void add_minima_in(const linear_job *j, const int mt, int panel, int row, sums_t acc) {
  const int format = j->w->format;
  if ((format & ~7) == K_MINIMA) add_minima_of(j, K_MINIMA | kind_of(format), mt, panel, row, acc);
  else add_minima_of(j, format, mt, panel, row, acc);
}

/* Not inlined: once for all kinds of codes. */
static __attribute__((noinline)) void add_minima(const linear_job *j, int mt, int panel, int row, sums_t acc) {
#define CASE(MT) case MT: add_minima_in(j, MT, panel, row, acc); break
  switch (mt) {
    CASE(1); CASE(2); CASE(3);
#if MAX_MT > 4
    CASE(4); CASE(5);
#endif
#if MAX_MT > 6
    CASE(6); CASE(7);
#endif
    default: add_minima_in(j, MAX_MT, panel, row, acc);
  }
#undef CASE
}

/* Minima, then the epilogue. */
INLINE void finish_tile(const linear_job *j, const int mt, int panel, int row, sums_t acc) {
  if (j->w->format & HAS_MINIMUM) add_minima(j, mt, panel, row, acc);
  store_tile(j, mt, panel, row, acc);
}

/* Two of a lane's words of u for vector g of the rows: as they are, or less the offset and times the factor. */
INLINE vi folded(const int kind, vi words, const scales_t *s, int half, int g) {
  return FOLDS(kind) ? vw_mul(vw_sub(words, vi_set(0x00200020)), s->factor[half][g]) : words;
}

#endif
#endif
