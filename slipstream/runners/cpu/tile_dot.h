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
    else add_folded(from, to, s, half, rest, folded_sum);
  }
  if (FOLDS(kind)) add_dots(from, to, s, 0, folded_sum, x, blocks, acc);
}

INLINE void tile_dot(const linear_job *j, const int kind, const int halves, const int mt, int panel, int row) {
  const int blocks = num_blocks(j->w->cols), half = mt <= WIDE_MT ? mt : (mt + 1) / 2, format = known_format(j->w, kind);
  const x_block *x = j->x_blocks + (int64_t)row * blocks;
  const vi table = load_table(kind, j->w);
  place_t at = first_block(j->w, panel);
  scales_t scales;
  sums_t acc;
  clear(mt, acc);
  for (int b = 0; b < blocks; next_block(format, ++b, &at)) {
    const int8_t *parts = parts_of(j->parts, blocks, row, b);
    load_scales(kind, mt, format, at, &scales);
    dot_block(kind, halves, mt, 0, half, format, table, at.units, &scales, parts, x + b, blocks, j->fetch, acc);
    if (half < mt) dot_block(kind, halves, mt, half, mt, format, table, at.units, &scales, parts, x + b, blocks, 0, acc);
  }
  finish_tile(j, mt, panel, row, acc);
}

#endif
#endif
