/* Shared by the tiles of linear.c: the job, the epilogue of a result, and prefetching. */
#ifndef SS_TILE_H
#define SS_TILE_H

#include "weight.h"

#define FETCH_BYTES 4096

typedef struct {
  float step; /* of x, per unit of v */
  float sum; /* of x as quantized */
  int32_t start; /* where the integer sum starts, so that unsigned weights come out signed */
} block_scales;

typedef struct {
  const weight_t *w;
  const float *x; /* [m, >= padded cols] */
  float *padded; /* [m, padded cols]: a copy of x in whole blocks, where it has none */
  float *sums; /* [m, blocks]: sums of x, float tiles of W4M only */
  int8_t *parts; /* x in two bytes or in words, integer tiles only (tile_dot.h, tile_word.h) */
  block_scales *x_scales; /* [m, blocks]: integer tiles only */
  const float *bias, *add;
  float *out;
  int64_t ldx, ldo, lda;
  int m, panels, slabs, panels_per_chunk, chunks_per_slab;
  int fetch; /* whether weights are fetched ahead */
  int prepare0, chunk0; /* the first of its items among all jobs' */
} linear_job;

typedef vf sums_t[MAX_MT][NUM_GROUPS];

/* bias, residual and store of one vector of a row; n of its lanes exist. */
INLINE void store_vector(const linear_job *j, vf value, int64_t row, int col, int n) {
  float *out = j->out + row * j->ldo + col;
  if (n >= VL) {
    if (j->bias) value = v_add(value, v_load(j->bias + col));
    if (j->add) value = v_add(value, v_load(j->add + row * j->lda + col));
    v_store(out, value);
    return;
  }
  float lane[VL];
  v_store(lane, value);
  for (int i = 0; i < n; i++) {
    if (j->bias) lane[i] += j->bias[col + i];
    if (j->add) lane[i] += j->add[row * j->lda + col + i];
    out[i] = lane[i];
  }
}

/* Weights come from memory once a step, in order. Prefetchers of Intel's processors stop at every page: fetching ahead by
 * instructions made one row 1.4 times as fast there. AMD's do better when left alone: 0.85 to 0.9 (docs/LOG.md). */
INLINE int fetching_pays(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  return !__builtin_cpu_is("amd");
#else
  return 1;
#endif
}

/* One quarter of the block FETCH_BYTES ahead: all of it at once would occupy the buffers that the block's own loads need. */
INLINE void fetch_quarter(const int format, const uint8_t *p, const int quarter, int fetch) {
  const int lines = (block_bytes(format) + 63) / 64, from = lines * quarter / 4, to = lines * (quarter + 1) / 4;
  if (!fetch) return;
  _Pragma("GCC unroll 32") for (int i = from; i < to; i++) __builtin_prefetch(p + FETCH_BYTES + 64 * i, 0, 3);
}

INLINE void fetch_ahead(const int format, const uint8_t *p, int fetch) {
  _Pragma("GCC unroll 4") for (int quarter = 0; quarter < 4; quarter++) fetch_quarter(format, p, quarter, fetch);
}

INLINE void store_tile(const linear_job *j, const int mt, int panel, int row, sums_t acc) {
  for (int m = 0; m < mt; m++)
    for (int g = 0; g < NUM_GROUPS; g++) {
      int col = panel * PANEL + g * VL;
      store_vector(j, acc[m][g], row + m, col, j->w->rows - col);
    }
}

INLINE void clear(const int mt, sums_t s) {
  _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++)
    for (int g = 0; g < NUM_GROUPS; g++) s[m][g] = v_set(0.0f);
}

#endif
