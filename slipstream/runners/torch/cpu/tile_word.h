/* A tile of a block format in integers, on machines that multiply 16-bit words in pairs (AVX2, AVX-512 without VNNI).
 *
 * x is rounded to 15 bits, as in tile_dot.h, and kept as words; the weights' q are widened to words in registers. A
 * block's sum is the same exact integer as there and meets the same float operations in the same order.
 */
#ifndef SS_TILE_WORD_H
#define SS_TILE_WORD_H

#include "tile_dot.h"

#ifdef HAS_WORD

/* The sums fit into the registers only if the compiler adds products in the order written and does not keep words of x
 * for the next group: it may forget what it knows of a pointer, and must have a sum complete at this point. */
#define HIDE(pointer) __asm__("" : "+r"(pointer))
#define IN_REGISTER(sum) __asm__("" : "+x"(sum))

/* Words of v[0..31] in the order of the lanes' pairs: of each 8 columns 0 4, 2 6, 1 5, 3 7. */
INLINE void store_words(const int32_t *v, int16_t *to) {
  static const int order[8] = {0, 4, 2, 6, 1, 5, 3, 7};
  for (int k = 0; k < BLOCK; k += 8)
    for (int i = 0; i < 8; i++) to[k + i] = (int16_t)v[k + order[i]];
}

/* One block of x: its words, and what the sums need beside them. */
INLINE void round_words(const float *x, int offset, int16_t *to, block_facts *facts) {
  int32_t v[BLOCK], sum = 0;
  float top = largest(x);
  vf scale = v_set(top > 1e-30f ? TOP / top : 0.0f);
  for (int i = 0; i < BLOCK; i += VL) vi_store(v + i, v_round(v_mul(v_load(x + i), scale)));
  for (int k = 0; k < BLOCK; k++) sum += v[k];
  store_words(v, to);
  facts->step = top > 1e-30f ? top / TOP : 0.0f;
  facts->sum = facts->step * (float)sum;
  facts->start = -offset * sum;
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

INLINE void word_block(const int format, const int mt, const uint8_t *p, const int16_t *words, const block_facts *facts,
                       int blocks, int fetch, sums_t acc) {
  const scale_t *scale = (const scale_t *)(p + payload_bytes(format));
  vi sum[MAX_MT][NUM_GROUPS];
  _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++)
    _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) sum[m][g] = vi_set(facts[(int64_t)m * blocks].start);
  _Pragma("GCC unroll 4") for (int i = 0; i < BLOCK / 8; i++) {
    fetch_quarter(format, p, i, fetch);
    _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
      vi w[4];
      HIDE(words);
      load_words(format, p + g * VL * UNIT_BYTES, i, w);
      _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++)
        _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++) {
          vi x = vi_set(word_at((const int8_t *)(words + m * BLOCK), 4 * i + k));
          sum[m][g] = vi_add(sum[m][g], vw_dot(w[k], x));
          IN_REGISTER(sum[m][g]);
        }
    }
  }
  _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
    vf d = v_load_scale(scale + g * VL);
    vf low = format == W4M ? v_fma(d, v_set(8.0f), v_load_scale(scale + PANEL + g * VL)) : d;
    _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++)
      acc[m][g] = add_dot(format, d, low, sum[m][g], facts + (int64_t)m * blocks, acc[m][g]);
  }
}

INLINE void tile_word(const linear_job *j, const int format, const int mt, int panel, int row) {
  const int blocks = num_blocks(j->w->cols);
  const uint8_t *p = block_of(j->w, panel * PANEL, 0);
  const block_facts *facts = j->facts + (int64_t)row * blocks;
  sums_t acc;
  clear(mt, acc);
  for (int b = 0; b < blocks; b++, p += block_bytes(format)) {
    const int16_t *words = (const int16_t *)parts_of((int8_t *)j->parts, blocks, row, b);
    word_block(format, mt, p, words, facts + b, blocks, j->fetch, acc);
  }
  store_tile(j, mt, panel, row, acc);
}

#endif
#endif
