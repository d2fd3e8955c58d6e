/* A tile of a block format on machines that multiply 16-bit words in pairs: see tile_integer.h for the sums. x in 15 bits is
 * a word; the weights' u are widened to words in registers. Those that multiply bytes too (tile_wide.h) have registers to
 * spare; the others (AVX2, AVX-512 without VNNI) do not.
 */
#ifndef SS_TILE_WORD_H
#define SS_TILE_WORD_H

#include "tile_integer.h"
#include "tile_wide.h"

#if defined(HAS_WORDS) && !defined(HAS_DOT)

/* The sums fit into the registers only if products are added in the order written, which integers do not need, and if weights
 * are loaded again for each pair of columns. So the compiler is kept from knowing that a pointer is the same as before, and
 * from leaving a sum for later. */
#define HIDE(pointer) __asm__("" : "+r"(pointer))
#define IN_REGISTER(sum) __asm__("" : "+v"(sum))

/* Codes that take more than a shift and a mask are unpacked to bytes, once for all rows. */
#define UNPACKS(kind) ((kind) == TABLE4 || (kind) == CODES5 || (kind) == CODES6)
typedef vi unpacked_t[BLOCK / 8][NUM_GROUPS][2];

INLINE void unpack(const int kind, const uint8_t *p, vi table, unpacked_t to) {
  if (UNPACKS(kind)) _Pragma("GCC unroll 4") for (int i = 0; i < BLOCK / 8; i++)
    _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) load_pair(kind, p + g * VL * UNIT_BYTES, i, table, to[i][g]);
}

/* Pair k of the u of columns 8 i to 8 i + 7, as words, for one vector of rows. p: its units. bytes: where UNPACKS. */
INLINE vi load_word(const int kind, const uint8_t *p, const vi *bytes, const int i, const int k) {
  if (kind == CODES4) {
    static const int shift[4] = {0, 8, 4, 12};
    const vi a = vi_load(p + i * PANEL * UNIT_BYTES), shifted = k ? vw_shr(a, shift[k]) : a;
    return k == 3 ? shifted : vi_and(shifted, vi_set(0x000F000F));
  }
  const vi a = kind == CODES8 ? vi_load(p + (2 * i + k / 2) * PANEL * UNIT_BYTES) : bytes[k / 2];
  return k % 2 ? vw_shr(a, 8) : vi_and(a, vi_set(0x00FF00FF));
}

/* The products of 8 columns, for mt rows. */
INLINE void add_words(const int kind, const int halves, const int mt, const uint8_t *p, vi bytes[NUM_GROUPS][2], const int i,
                      const scales_t *s, const int16_t *words, vi sum[][NUM_GROUPS]) {
  _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++) {
    vi w[NUM_GROUPS];
    HIDE(p);
    HIDE(bytes);
    _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
      w[g] = load_word(kind, p + g * VL * UNIT_BYTES, bytes[g], i, k);
      if (halves == 1) w[g] = folded(kind, w[g], s, i / 2, g);
    }
    _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++) {
      const vi v = vi_set(word_at(words + m * BLOCK, 4 * i + k));
      _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
        sum[m][g] = vw_add_dot(sum[m][g], w[g], v);
        IN_REGISTER(sum[m][g]);
      }
    }
  }
}

/* One block for the rows from .. to - 1 of a tile. */
INLINE void word_rows(const int kind, const int halves, const int from, const int to, int format, const uint8_t *p,
                      unpacked_t bytes, const scales_t *s, const int16_t *words, const x_block *x, int blocks, int fetch,
                      sums_t acc) {
  vi folded_sum[WORD_MT][NUM_GROUPS];
  _Pragma("GCC unroll 2") for (int half = 0; half < halves; half++) {
    const int which = halves == 2 ? half : WHOLE, pairs = BLOCK / 8 / halves;
    vi sum[WORD_MT][NUM_GROUPS];
    _Pragma("GCC unroll 8") for (int m = from; m < to; m++)
      _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++)
        sum[m - from][g] = FOLDS(kind) && halves == 1 ? vi_set(0) : start_of(format, x + (int64_t)m * blocks, which);
    _Pragma("GCC unroll 4") for (int i = half * pairs; i < (half + 1) * pairs; i++) {
      fetch_quarter(kind, p, i, fetch);
      add_words(kind, halves, to - from, p, bytes[i], i, s, words + from * BLOCK, sum);
    }
    if (!FOLDS(kind) || halves == 1) add_dots(from, to, s, half, sum, x, blocks, acc);
    else add_folded(from, to, s, half, sum, folded_sum);
  }
  if (FOLDS(kind) && halves == 2) add_dots(from, to, s, 0, folded_sum, x, blocks, acc);
}

INLINE void word_block(const int kind, const int halves, const int mt, int format, vi table, const uint8_t *p,
                       const scales_t *s, const int16_t *words, const x_block *x, int blocks, int fetch, sums_t acc) {
  const int half = mt <= WORD_MT ? mt : (mt + 1) / 2;
  unpacked_t bytes;
  unpack(kind, p, table, bytes);
  word_rows(kind, halves, 0, half, format, p, bytes, s, words, x, blocks, fetch, acc);
  if (half == mt) return;
  __asm__ volatile("" ::: "memory"); /* the first rows are done before the others begin */
  word_rows(kind, halves, half, mt, format, p, bytes, s, words, x, blocks, 0, acc);
}

#endif

#if defined(HAS_WORD_DOT) || (defined(HAS_WORDS) && !defined(HAS_DOT))

INLINE void tile_word(const linear_job *j, const int kind, const int halves, const int mt, int panel, int row) {
  const int blocks = num_blocks(j->w->cols), format = known_format(j->w, kind);
  const x_block *x = j->x_blocks + (int64_t)row * blocks;
  const vi table = load_table(kind, j->w);
  place_t at = first_block(j->w, panel);
  scales_t scales;
  sums_t acc;
  clear(mt, acc);
  for (int b = 0; b < blocks; next_block(format, ++b, &at)) {
    const int16_t *words = (const int16_t *)parts_of(j->parts, blocks, row, b);
    load_scales(kind, mt, format, at, &scales);
    word_block(kind, halves, mt, format, table, at.units, &scales, words, x + b, blocks, j->fetch, acc);
  }
  finish_tile(j, mt, panel, row, acc);
}

#endif
#endif
