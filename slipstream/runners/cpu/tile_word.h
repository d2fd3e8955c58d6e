/* A tile of a block format on machines that multiply 16-bit words in pairs: see tile_integer.h for the sums. x in 15 bits is
 * a word; the weights' u are widened to words in registers. Those that multiply bytes too (tile_wide.h) have registers to
 * spare; the others (AVX2, AVX-512 without VNNI) do not.
 */
#ifndef SS_TILE_WORD_H
#define SS_TILE_WORD_H

#include "tile_integer.h"
#include "tile_wide.h"

#if defined(HAS_WORDS) && !defined(HAS_DOT)

/* The sums fit into the registers only if products are added in the order written, which integers do not need, and if words
 * of x are loaded again for each group. So the compiler is kept from knowing that a pointer is the same as before, and from
 * leaving a sum for later. */
#define HIDE(pointer) __asm__("" : "+r"(pointer))
#define IN_REGISTER(sum) __asm__("" : "+v"(sum))

/* The u of 8 columns of a block for one vector of rows: four pairs of words. */
INLINE void load_words(const int kind, const uint8_t *p, int i, vi table, vi w[4]) {
  const vi low = vi_set(0x00FF00FF);
  vi pair[2];
  load_pair(kind, p, i, table, pair);
  w[0] = vi_and(pair[0], low), w[1] = vw_shr(pair[0], 8);
  w[2] = vi_and(pair[1], low), w[3] = vw_shr(pair[1], 8);
}

INLINE void word_block(const int kind, const int halves, const int mt, int format, vi table, const uint8_t *p,
                       const scales_t *s, const int16_t *words, const x_block *x, int blocks, int fetch, sums_t acc) {
  _Pragma("GCC unroll 2") for (int half = 0; half < halves; half++) {
    const int which = halves == 2 ? half : WHOLE, pairs = BLOCK / 8 / halves;
    vi sum[MAX_MT][NUM_GROUPS];
    _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++)
      _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++)
        sum[m][g] = FOLDS(kind) ? vi_set(0) : start_of(format, x + (int64_t)m * blocks, which);
    _Pragma("GCC unroll 4") for (int i = half * pairs; i < (half + 1) * pairs; i++) {
      fetch_quarter(kind, p, i, fetch);
      _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
        vi w[4];
        HIDE(words);
        load_words(kind, p + g * VL * UNIT_BYTES, i, table, w);
        _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++) {
          const vi factored = folded(kind, w[k], s, i / 2, g);
          _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++) {
            vi v = vi_set(word_at(words + m * BLOCK, 4 * i + k));
            sum[m][g] = vw_add_dot(sum[m][g], factored, v);
            IN_REGISTER(sum[m][g]);
          }
        }
      }
    }
    add_dots(0, mt, s, half, sum, x, blocks, acc);
  }
}

#endif

#if defined(HAS_WORD_DOT) || (defined(HAS_WORDS) && !defined(HAS_DOT))

INLINE void tile_word(const linear_job *j, const int kind, const int halves, const int mt, int panel, int row) {
  const int blocks = num_blocks(j->w->cols), format = j->w->format;
  const x_block *x = j->x_blocks + (int64_t)row * blocks;
  const vi table = load_table(kind, j->w);
  place_t at = first_block(j->w, panel);
  scales_t scales;
  sums_t acc;
  clear(mt, acc);
  for (int b = 0; b < blocks; next_block(format, ++b, &at)) {
    const int16_t *words = (const int16_t *)parts_of(j->parts, blocks, row, b);
    load_scales(format, &at, &scales);
    word_block(kind, halves, mt, format, table, at.units, &scales, words, x + b, blocks, j->fetch, acc);
  }
  finish_tile(j, mt, panel, row, acc);
}

#endif
#endif
