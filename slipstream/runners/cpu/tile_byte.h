/* A tile of one row on machines that multiply bytes in pairs to 16 bits (AVX2, AVX-512 without VNNI): see tile_integer.h for
 * the sums, which are the same integers.
 *
 * Codes of up to 6 bits are not widened: x is two signed bytes, v = 128 high + low, |high| <= 127, |low| <= 64, and products
 * are added up in 16 bits as long as they fit. A word of a lane is a sum over half of the columns:
 *
 *     CODES4    15 * 127 * 16 columns = 30,480: a block
 *     CODES5    31 * 127 * 8 columns = 31,496: the high bytes of half a block; 31 * 64 * 16 = 31,744: the low ones of a block
 *     CODES6    32 * 127 * 8 columns = 32,512: half a block of u - 32; u alone would not fit
 *
 * Widening then multiplies by 128, or by a factor, for nothing.
 */
#ifndef SS_TILE_BYTE_H
#define SS_TILE_BYTE_H

#include "tile_integer.h"

#if defined(HAS_WORDS) && !defined(HAS_DOT)
#define HAS_BYTES 1

INLINE int takes_bytes(int kind) { return kind == CODES4 || kind == CODES5 || kind == CODES6; }

/* Where 16-bit sums over u - 32 start, for the halves of 32 bytes: -32 times the sum of a word's columns. */
INLINE void store_starts(const int8_t *bytes, int8_t *to) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(32), _mm256_loadu_si256((const __m256i *)bytes));
  const __m256i two = _mm256_add_epi16(pairs, _mm256_shuffle_epi32(pairs, 0xB1));
  const __m256i sums = _mm256_add_epi16(two, _mm256_shuffle_epi32(two, 0x4E));
  const __m256i starts = _mm256_sub_epi16(_mm256_setzero_si256(), sums);
  const int32_t halves[2] = {_mm256_extract_epi32(starts, 0), _mm256_extract_epi32(starts, 4)};
  memcpy(to, halves, 8);
}

/* One row's block: high bytes, low bytes, starts. A group of one row has room for them. */
INLINE void store_row_bytes(const int32_t *v, int8_t *to) {
  split_bytes(v, to, to + BLOCK);
  store_starts(to, to + 2 * BLOCK);
  store_starts(to + BLOCK, to + 2 * BLOCK + 8);
}

typedef struct {
  vi high[NUM_GROUPS], low[NUM_GROUPS]; /* in 16 bits */
  vi t[NUM_GROUPS], t_low[NUM_GROUPS]; /* in 32; t_low: CODES6, whose t is that of the high bytes until the end */
} byte_sums;

/* The products of columns 8 i to 8 i + 7. starts: whether 16-bit sums start here. */
INLINE void add_bytes(const int kind, const uint8_t *p, const int i, const int starts_high, const int starts_low,
                      const int8_t *parts, byte_sums *sums) {
  const vi h0 = vi_set(word_at(parts, 2 * i)), h1 = vi_set(word_at(parts, 2 * i + 1));
  const vi l0 = vi_set(word_at(parts + BLOCK, 2 * i)), l1 = vi_set(word_at(parts + BLOCK, 2 * i + 1));
  const vi high0 = vi_set(word_at(parts + 2 * BLOCK, i / 2)), low0 = vi_set(word_at(parts + 2 * BLOCK, 2 + i / 2));
  _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
    vi w[2];
    load_pair(kind, p + g * VL * UNIT_BYTES, i, h0, w);
    const vi high = vw_add(vb_dot(w[0], h0), vb_dot(w[1], h1)), low = vw_add(vb_dot(w[0], l0), vb_dot(w[1], l1));
    sums->high[g] = !starts_high ? vw_add(sums->high[g], high) : kind == CODES6 ? vw_add(high0, high) : high;
    sums->low[g] = !starts_low ? vw_add(sums->low[g], low) : kind == CODES6 ? vw_add(low0, low) : low;
  }
}

/* 16-bit sums over half a block of CODES6, times their factors. */
INLINE void widen_folded(const scales_t *s, const int half, byte_sums *sums) {
  _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
    const vi a = vw_dot(sums->high[g], s->factor[half][g]), b = vw_dot(sums->low[g], s->factor[half][g]);
    sums->t[g] = half ? vi_add(sums->t[g], a) : a;
    sums->t_low[g] = half ? vi_add(sums->t_low[g], b) : b;
    if (half) sums->t[g] = vi_add(vi_shl(sums->t[g], 7), sums->t_low[g]);
  }
}

INLINE void widen(const int high, const int low, byte_sums *sums) {
  _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
    if (high) sums->t[g] = vi_add(sums->t[g], vw_dot(sums->high[g], vi_set(0x00800080)));
    if (low) sums->t[g] = vi_add(sums->t[g], vw_dot(sums->low[g], vi_set(0x00010001)));
  }
}

INLINE void byte_block(const int kind, const int halves, int format, const uint8_t *p, const scales_t *s, const int8_t *parts,
                       const x_block *x, int fetch, sums_t acc) {
  const int high_columns = kind == CODES4 && halves == 1 ? 32 : 16, low_columns = kind == CODES6 || halves == 2 ? 16 : 32;
  const int group = kind == CODES6 ? 32 : BLOCK / halves;
  byte_sums sums;
  _Pragma("GCC unroll 4") for (int i = 0; i < BLOCK / 8; i++) {
    const int first = 8 * i, end = 8 * i + 8, half = i / 2;
    fetch_quarter(kind, p, i, fetch);
    if (kind != CODES6 && first % group == 0) _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++)
      sums.t[g] = start_of(format, x, halves == 2 ? half : WHOLE);
    add_bytes(kind, p, i, first % high_columns == 0, first % low_columns == 0, parts, &sums);
    if (kind != CODES6) widen(end % high_columns == 0, end % low_columns == 0, &sums);
    else if (i % 2) widen_folded(s, half, &sums);
    if (end % group == 0) add_dots(0, 1, s, group == 32 ? 0 : half, &sums.t, x, 0, acc);
  }
}

INLINE void tile_byte(const linear_job *j, const int kind, const int halves, int panel, int row) {
  const int blocks = num_blocks(j->w->cols), format = known_format(j->w, kind);
  const x_block *x = j->x_blocks + (int64_t)row * blocks;
  place_t at = first_block(j->w, panel);
  scales_t scales;
  sums_t acc;
  clear(1, acc);
  for (int b = 0; b < blocks; next_block(format, ++b, &at)) {
    const int8_t *parts = parts_of(j->parts, blocks, row, b);
    load_scales(kind, 1, format, at, &scales);
    byte_block(kind, halves, format, at.units, &scales, parts, x + b, j->fetch, acc);
  }
  finish_tile(j, 1, panel, row, acc);
}

#endif
#endif
