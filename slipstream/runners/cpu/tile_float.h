/* A tile in float32: weights are widened to floats in registers.
 *
 *     for each group of 32 columns, or of 16:  s = sum over k of x[k] (u[k] - offset), k rising, fused multiply-add from 0
 *                                              acc = scale s + acc          (plain formats: acc + s)
 *                                              acc = minimum sum(x in group) + acc      (formats with minima)
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

/* Columns of codes, `pairs` times 8 of them from pair i on. */
INLINE void block_codes(const int kind, const int mt, const uint8_t *p, int i, int pairs, vi table, vi offset,
                        const float *x, int64_t ldx, sums_t s) {
  for (const int end = i + pairs; i < end; i++) {
    vi a[2], b[2], c[2];
    load_pair(kind, p, i, table, a);
    load_pair(kind, p + VL * UNIT_BYTES, i, table, b);
    load_pair(kind, p + 2 * VL * UNIT_BYTES, i, table, c);
    _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++)
      STEP(mt, v_byte(a[k % 2], k / 2, offset), v_byte(b[k % 2], k / 2, offset), v_byte(c[k % 2], k / 2, offset), 8 * i + k);
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

/* One block of codes: acc = scale s + acc for each group, and the minimum's share. sums: of x. */
INLINE void float_block(const int kind, const int halves, const int mt, int format, vi table, const place_t *at,
                        const float *x, int64_t ldx, const float *sums, int64_t lds, sums_t acc) {
  scales_t scales;
  load_any_scales(format, at->header, at->factors, &scales);
  const vi offset = vi_set(offset_of(format));
  const int pairs = BLOCK / 8 / halves;
  for (int half = 0; half < halves; half++) {
    sums_t s;
    clear(mt, s);
    block_codes(kind, mt, at->units, half * pairs, pairs, table, offset, x, ldx, s);
    _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
      _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++) acc[m][g] = v_fma(scales.scale[half][g], s[m][g], acc[m][g]);
    }
    if (format & HAS_MINIMUM) _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
      const vf low = load_minimum(format, at->header, at->factors, half, g * VL);
      _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++)
        acc[m][g] = v_fma(low, v_set(sums[m * lds + (halves == 2 ? half : WHOLE)]), acc[m][g]);
    }
  }
}

INLINE void plain_block(const int kind, const int mt, const uint8_t *p, const float *x, int64_t ldx, sums_t acc) {
  sums_t s;
  clear(mt, s);
  if (kind == BF16) block_bf16(mt, p, x, ldx, s);
  else block_f32(mt, p, x, ldx, s);
  _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++)
    _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) acc[m][g] = v_add(acc[m][g], s[m][g]);
}

INLINE void tile_float(const linear_job *j, const int kind, const int halves, const int mt, int panel, int row) {
  const int blocks = num_blocks(j->w->cols), format = j->w->format;
  const float *x = j->x + row * j->ldx, *sums = j->sums ? j->sums + (int64_t)row * blocks * NUM_SUMS : NULL;
  const int64_t ldx = j->ldx, lds = (int64_t)blocks * NUM_SUMS;
  const vi table = load_table(kind, j->w);
  place_t at = first_block(j->w, panel);
  sums_t acc;
  clear(mt, acc);
  for (int b = 0; b < blocks; next_block(format, ++b, &at), x += BLOCK) {
    fetch_ahead(kind, at.units, j->fetch);
    if (kind >= BF16) plain_block(kind, mt, at.units, x, ldx, acc);
    else float_block(kind, halves, mt, format, table, &at, x, ldx, sums ? sums + b * NUM_SUMS : NULL, lds, acc);
  }
  store_tile(j, mt, panel, row, acc);
}

#endif
