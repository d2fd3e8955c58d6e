/* A tile of a block format on machines that multiply 16-bit words in pairs (AVX2, AVX-512 without VNNI): see tile_integer.h
 * for the sums. x in 15 bits is a word; the weights' q are widened to words in registers.
 */
#ifndef SS_TILE_WORD_H
#define SS_TILE_WORD_H

#include "tile_integer.h"

#ifdef HAS_WORD

/* The sums fit into the registers only if products are added in the order written, which integers do not need, and if words
 * of x are loaded again for each group. So the compiler is kept from knowing that a pointer is the same as before, and from
 * leaving a sum for later. */
#define HIDE(pointer) __asm__("" : "+r"(pointer))
#define IN_REGISTER(sum) __asm__("" : "+v"(sum))

/* What is added to q to make it unsigned. */
INLINE int offset_of(int format) { return format == W8 ? 0 : 8; }

/* Words of v[0..31] in the order of the lanes' pairs: of each 8 columns 0 4, 2 6, 1 5, 3 7. */
INLINE void store_words(const int32_t *v, int16_t *to) {
  static const int order[8] = {0, 4, 2, 6, 1, 5, 3, 7};
  for (int k = 0; k < BLOCK; k += 8)
    for (int i = 0; i < 8; i++) to[k + i] = (int16_t)v[k + order[i]];
}

/* The q of 8 columns of a block for one vector of rows: four pairs of words. W8 signed, the others unsigned. */
INLINE void load_words(const int format, const uint8_t *p, int i, vi w[4]) {
  if (format == W8) {
    vi even = vi_load(p + 2 * i * PANEL * UNIT_BYTES), odd = vi_load(p + (2 * i + 1) * PANEL * UNIT_BYTES);
    w[0] = vw_sra(vw_shl(even, 8), 8), w[1] = vw_sra(even, 8);
    w[2] = vw_sra(vw_shl(odd, 8), 8), w[3] = vw_sra(odd, 8);
    return;
  }
  const vi flip = vi_set(0x08080808), mask = vi_set(0x0F0F0F0F), low = vi_set(0x00FF00FF);
  vi a = vi_load(p + i * PANEL * UNIT_BYTES);
  vi even = vi_xor(vi_and(a, mask), flip), odd = vi_xor(vi_and(vi_shr(a, 4), mask), flip);
  w[0] = vi_and(even, low), w[1] = vw_shr(even, 8);
  w[2] = vi_and(odd, low), w[3] = vw_shr(odd, 8);
}

INLINE void word_block(const int format, const int mt, const uint8_t *p, const int16_t *words,
                       const block_scales *x_scales, int blocks, int fetch, sums_t acc) {
  const scale_t *scale = (const scale_t *)(p + payload_bytes(format));
  vi sum[MAX_MT][NUM_GROUPS];
  _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++)
    _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) sum[m][g] = vi_set(x_scales[(int64_t)m * blocks].start);
  _Pragma("GCC unroll 4") for (int i = 0; i < BLOCK / 8; i++) {
    fetch_quarter(format, p, i, fetch);
    _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
      vi w[4];
      HIDE(words);
      load_words(format, p + g * VL * UNIT_BYTES, i, w);
      _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++)
        _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++) {
          vi x = vi_set(word_at(words + m * BLOCK, 4 * i + k));
          sum[m][g] = vi_add(sum[m][g], vw_dot(w[k], x));
          IN_REGISTER(sum[m][g]);
        }
    }
  }
  _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
    vf d = v_load_scale(scale + g * VL);
    vf low = format == W4M ? v_fma(d, v_set(8.0f), v_load_scale(scale + PANEL + g * VL)) : d;
    _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++)
      acc[m][g] = add_dot(format, d, low, sum[m][g], x_scales + (int64_t)m * blocks, acc[m][g]);
  }
}

INLINE void tile_word(const linear_job *j, const int format, const int mt, int panel, int row) {
  const int blocks = num_blocks(j->w->cols);
  const uint8_t *p = block_of(j->w, panel * PANEL, 0);
  const block_scales *x_scales = j->x_scales + (int64_t)row * blocks;
  sums_t acc;
  clear(mt, acc);
  for (int b = 0; b < blocks; b++, p += block_bytes(format)) {
    const int16_t *words = (const int16_t *)parts_of(j->parts, blocks, row, b);
    word_block(format, mt, p, words, x_scales + b, blocks, j->fetch, acc);
  }
  store_tile(j, mt, panel, row, acc);
}

#endif
#endif
