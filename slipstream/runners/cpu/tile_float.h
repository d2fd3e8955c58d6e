/* A tile in float32: weights are widened to floats in registers.
 *
 *     for each block of 32 columns:  s = sum over k of x[k] q[k], k rising, fused multiply-add from 0
 *                                    acc = d s + acc          (plain formats: acc + s)
 *                                    acc = (m + 8 d) sum(x in block) + acc      (W4M only)
 */
#ifndef SS_TILE_FLOAT_H
#define SS_TILE_FLOAT_H

#include "tile.h"

/* s[m][g] += x[m][k0 + j] w[g] for one column of three vectors of rows. */
#define STEP(MT, W0, W1, W2, K)                                                                                       \
  do {                                                                                                                \
    vf w0_ = (W0), w1_ = (W1), w2_ = (W2);                                                                            \
    _Pragma("GCC unroll 8") for (int m = 0; m < (MT); m++) {                                                          \
      vf x_ = v_set(x[m * ldx + (K)]);                                                                                \
      s[m][0] = v_fma(w0_, x_, s[m][0]);                                                                              \
      s[m][1] = v_fma(w1_, x_, s[m][1]);                                                                              \
      s[m][2] = v_fma(w2_, x_, s[m][2]);                                                                              \
    }                                                                                                                 \
  } while (0)

INLINE void block_w4(const int mt, const uint8_t *p, const float *x, int64_t ldx, sums_t s) {
  for (int i = 0; i < 4; i++, p += PANEL * 4, x += 8) {
    vi a = vi_load(p), b = vi_load(p + VL * 4), c = vi_load(p + VL * 8);
    _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) STEP(mt, v_nibble(a, j), v_nibble(b, j), v_nibble(c, j), j);
  }
}

INLINE void block_w8(const int mt, const uint8_t *p, const float *x, int64_t ldx, sums_t s) {
  for (int i = 0; i < BLOCK; i += 8, p += 2 * PANEL * 4, x += 8) {
    const uint8_t *odd = p + PANEL * 4;
    vi a = vi_load(p), b = vi_load(p + VL * 4), c = vi_load(p + VL * 8);
    vi d = vi_load(odd), e = vi_load(odd + VL * 4), f = vi_load(odd + VL * 8);
    _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
      STEP(mt, v_byte(a, j), v_byte(b, j), v_byte(c, j), 2 * j);
      STEP(mt, v_byte(d, j), v_byte(e, j), v_byte(f, j), 2 * j + 1);
    }
  }
}

INLINE void block_bf16(const int mt, const uint8_t *p, const float *x, int64_t ldx, sums_t s) {
  const vi high = vi_set((int32_t)0xFFFF0000);
  for (int i = 0; i < BLOCK; i += 2, p += PANEL * 4, x += 2) {
    vi a = vi_load(p), b = vi_load(p + VL * 4), c = vi_load(p + VL * 8);
    STEP(mt, v_cast(vi_shl(a, 16)), v_cast(vi_shl(b, 16)), v_cast(vi_shl(c, 16)), 0);
    STEP(mt, v_cast(vi_and(a, high)), v_cast(vi_and(b, high)), v_cast(vi_and(c, high)), 1);
  }
}

INLINE void block_f32(const int mt, const uint8_t *p, const float *x, int64_t ldx, sums_t s) {
  const float *q = (const float *)p;
  for (int i = 0; i < BLOCK; i++, q += PANEL, x++) STEP(mt, v_load(q), v_load(q + VL), v_load(q + 2 * VL), 0);
}

/* acc = d s + acc, and the minimum's share. */
INLINE void add_block(const int format, const int mt, const uint8_t *p, const float *sums, int64_t lds, sums_t s,
                      sums_t acc) {
  const scale_t *scale = (const scale_t *)p;
  _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
    vf d = format <= W8 ? v_load_scale(scale + g * VL) : v_set(1.0f);
    vf low = format == W4M ? v_fma(d, v_set(8.0f), v_load_scale(scale + PANEL + g * VL)) : d;
    _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++) {
      acc[m][g] = format <= W8 ? v_fma(d, s[m][g], acc[m][g]) : v_add(acc[m][g], s[m][g]);
      if (format == W4M) acc[m][g] = v_fma(low, v_set(sums[m * lds]), acc[m][g]);
    }
  }
}

INLINE void tile_float(const linear_job *j, const int format, const int mt, int panel, int row) {
  const int blocks = num_blocks(j->w->cols);
  const uint8_t *p = block_of(j->w, panel * PANEL, 0);
  const float *x = j->x + row * j->ldx, *sums = j->sums + (format == W4M ? (int64_t)row * blocks : 0);
  const int64_t ldx = j->ldx;
  sums_t acc, s;
  clear(mt, acc);
  for (int b = 0; b < blocks; b++, x += BLOCK, p += block_bytes(format)) {
    fetch_ahead(format, p, j->fetch);
    clear(mt, s);
    if (format <= W4M) block_w4(mt, p, x, ldx, s);
    else if (format == W8) block_w8(mt, p, x, ldx, s);
    else if (format == BF16) block_bf16(mt, p, x, ldx, s);
    else block_f32(mt, p, x, ldx, s);
    add_block(format, mt, p + payload_bytes(format), sums + b, blocks, s, acc);
  }
  store_tile(j, mt, panel, row, acc);
}

#endif
