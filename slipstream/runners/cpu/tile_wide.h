/* A block of a tile of many rows on machines that multiply both bytes and words (AVX-512 VNNI): see tile_integer.h for the sums.
 *
 * The sums are the same integers as in tile_dot.h, so the bits are the same. With words a row has one integer sum instead of
 * two, so the registers hold those of eight rows, and weights are unpacked half as often.
 */
#ifndef SS_TILE_WIDE_H
#define SS_TILE_WIDE_H

#include "tile_dot.h"

#ifdef HAS_WORD_DOT

/* Word s of a block (weight.h): four u. */
INLINE vi load_word(const int kind, const uint8_t *p, const int s, vi table) {
  vi pair[2];
  load_pair(kind, p, s / 2, table, pair);
  return pair[s % 2];
}

INLINE void word_block(const int kind, const int halves, const int mt, int format, vi table, const uint8_t *p,
                       const scales_t *s, const int16_t *words, const x_block *x, int blocks, int fetch, sums_t acc) {
  const vi low = vi_set(0x00FF00FF);
  _Pragma("GCC unroll 2") for (int half = 0; half < halves; half++) {
    const int which = halves == 2 ? half : WHOLE, count = NUM_WORDS / halves;
    vi sum[MAX_MT][NUM_GROUPS];
    _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++)
      _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++)
        sum[m][g] = FOLDS(kind) ? vi_set(0) : start_of(format, x + (int64_t)m * blocks, which);
    _Pragma("GCC unroll 8") for (int i = half * count; i < (half + 1) * count; i++) {
      vi u[NUM_GROUPS];
      if (i % 2 == 0) fetch_quarter(kind, p, i / 2, fetch);
      _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) u[g] = load_word(kind, p + g * VL * UNIT_BYTES, i, table);
      _Pragma("GCC unroll 2") for (int k = 0; k < 2; k++) {
        vi w[NUM_GROUPS];
        _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++)
          w[g] = folded(kind, k ? vw_shr(u[g], 8) : vi_and(u[g], low), s, i / (NUM_WORDS / 2), g);
        _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++) {
          const vi v = vi_set(word_at(words + m * BLOCK, 2 * i + k));
          _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) sum[m][g] = vw_add_dot(sum[m][g], w[g], v);
        }
      }
    }
    add_dots(0, mt, s, half, sum, x, blocks, acc);
  }
}

#endif
#endif
