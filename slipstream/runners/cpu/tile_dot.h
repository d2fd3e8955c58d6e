/* A tile of a block format on machines that multiply bytes four at a time (VNNI): see tile_integer.h for the sums.
 *
 * x in 15 bits is two signed bytes, v = 128 high + low. A byte product does four times the work of a float one, so even
 * twice as many of them make four rows cost little more than one.
 */
#ifndef SS_TILE_DOT_H
#define SS_TILE_DOT_H

#include "tile_integer.h"

#define NUM_WORDS 8 /* of 4 columns in a block: of each 8 columns the even, then the odd */
#define WIDE_MT (MAX_MT / 2) /* rows whose two integer sums the registers hold together, for all groups */

#ifdef HAS_DOT

/* Bytes of v[0..31] in the order of the words. */
INLINE void store_bytes(const int32_t *v, int8_t *to) {
#if VL == 16
  const __m256i order = _mm256_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10,
                                         12, 14, 9, 11, 13, 15);
  __m128i a = _mm512_cvtepi32_epi8(vi_load(v)), b = _mm512_cvtepi32_epi8(vi_load(v + 16));
  _mm256_storeu_si256((__m256i *)to, _mm256_shuffle_epi8(_mm256_set_m128i(b, a), order));
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

/* One block for the rows from .. to - 1 of a tile. The integer sums of their high and low bytes stay in registers for all
 * groups of rows, and a word of x is read once for all of them: a broadcast for every product would keep the load ports as
 * busy as the byte products keep theirs. */
INLINE void dot_block(const int kind, const int halves, const int mt, const int from, const int to, int format, vi table,
                      const uint8_t *p, const scales_t *s, const int8_t *parts, const x_block *x, int blocks, int fetch,
                      sums_t acc) {
  vi folded_sum[WIDE_MT][NUM_GROUPS]; /* tile_integer.h */
  _Pragma("GCC unroll 2") for (int half = 0; half < halves; half++) {
    const int which = halves == 2 ? half : WHOLE, pairs = NUM_WORDS / 2 / halves;
    vi high[WIDE_MT][NUM_GROUPS], rest[WIDE_MT][NUM_GROUPS];
    _Pragma("GCC unroll 4") for (int m = from; m < to; m++)
      _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++)
        high[m - from][g] = vi_set(0), rest[m - from][g] = start_of(format, x + (int64_t)m * blocks, which);
    _Pragma("GCC unroll 4") for (int i = half * pairs; i < (half + 1) * pairs; i++) {
      vi w[NUM_GROUPS][2];
      fetch_quarter(kind, p, i, fetch);
      _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) load_pair(kind, p + g * VL * UNIT_BYTES, i, table, w[g]);
      _Pragma("GCC unroll 4") for (int m = from; m < to; m++)
        _Pragma("GCC unroll 2") for (int k = 0; k < 2; k++) {
          vi *h = high[m - from], *r = rest[m - from];
          const vi high_word = vi_set(word_at(parts + m * BLOCK, 2 * i + k));
          const vi low_word = vi_set(word_at(parts + (mt + m) * BLOCK, 2 * i + k));
          _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) h[g] = vi_dot(h[g], w[g][k], high_word);
          _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) r[g] = vi_dot(r[g], w[g][k], low_word);
        }
    }
    _Pragma("GCC unroll 4") for (int m = 0; m < to - from; m++)
      _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) rest[m][g] = vi_add(vi_shl(high[m][g], 7), rest[m][g]);
    if (!FOLDS(kind)) add_dots(from, to, s, half, rest, x, blocks, acc);
    else _Pragma("GCC unroll 4") for (int m = 0; m < to - from; m++)
      _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
        const vi share = vi_mul(rest[m][g], vi_sra(s->factor[half][g], 16));
        folded_sum[m][g] = half ? vi_add(folded_sum[m][g], share) : share;
      }
  }
  if (FOLDS(kind)) add_dots(from, to, s, 0, folded_sum, x, blocks, acc);
}

INLINE void tile_dot(const linear_job *j, const int kind, const int halves, const int mt, int panel, int row) {
  const int blocks = num_blocks(j->w->cols), half = mt <= WIDE_MT ? mt : (mt + 1) / 2, format = j->w->format;
  const x_block *x = j->x_blocks + (int64_t)row * blocks;
  const vi table = load_table(kind, j->w);
  place_t at = first_block(j->w, panel);
  scales_t scales;
  sums_t acc;
  clear(mt, acc);
  for (int b = 0; b < blocks; next_block(format, ++b, &at)) {
    const int8_t *parts = parts_of(j->parts, blocks, row, b);
    load_scales(format, &at, &scales);
    dot_block(kind, halves, mt, 0, half, format, table, at.units, &scales, parts, x + b, blocks, j->fetch, acc);
    if (half < mt) dot_block(kind, halves, mt, half, mt, format, table, at.units, &scales, parts, x + b, blocks, 0, acc);
  }
  finish_tile(j, mt, panel, row, acc);
}

#endif
#endif
