/* out = x w^T (+ bias) (+ add), x in float32, w packed (weight.h).
 *
 * Every output element is computed in one order, whatever the number of rows, the tile and the thread:
 *
 *     for each block of 32 columns:  s = sum over k of x[k] q[k], k rising, fused multiply-add from 0
 *                                    acc = d s + acc          (plain formats: acc + s)
 *                                    acc = (m + 8 d) sum(x in block) + acc      (W4M only)
 *
 * A tile keeps s for MT rows of x and three vectors of output rows in registers, so a weight is unpacked once for
 * MT rows: verifying a few drafted tokens costs little more than decoding one. (Unpacking a block to memory once for
 * many rows, with x transposed, was measured for prefill and gained nothing.)
 */
#include "linear.h"

#include <stdlib.h>

#include "pool.h"

#define FETCH_BYTES 4096
#define ROWS_PER_ITEM 64 /* rows of x that meet one panel while it is in the nearest cache */

typedef struct {
  const weight_t *w;
  const float *x; /* [m, >= padded cols] */
  const float *sums; /* [m, blocks], W4M only */
  const float *bias, *add;
  float *out;
  int64_t ldx, ldo, lda;
  int m, panels, panels_per_chunk, chunks_per_slab;
} linear_job;

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

typedef vf sums_t[MAX_MT][NUM_GROUPS];

INLINE void block_w4(const int mt, const uint8_t *p, const float *x, int64_t ldx, sums_t s) {
  for (int i = 0; i < 4; i++, p += PANEL * 4, x += 8) {
    vi a = vi_load(p), b = vi_load(p + VL * 4), c = vi_load(p + VL * 8);
    _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) STEP(mt, v_nibble(a, j), v_nibble(b, j), v_nibble(c, j), j);
  }
}

INLINE void block_w8(const int mt, const uint8_t *p, const float *x, int64_t ldx, sums_t s) {
  const int8_t *q = (const int8_t *)p;
  for (int i = 0; i < BLOCK; i += 4, x += 4) {
    _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++, q += PANEL)
        STEP(mt, v_load_i8(q), v_load_i8(q + VL), v_load_i8(q + 2 * VL), j);
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

/* Weights come from memory once a step, in order; hardware prefetchers stop at every page. Measured: 1.4x at one row. */
INLINE void fetch_ahead(const int format, const uint8_t *p) {
  _Pragma("GCC unroll 128") for (int i = 0; i < block_bytes(format); i += 64) __builtin_prefetch(p + FETCH_BYTES + i, 0, 3);
}

INLINE void tile(const linear_job *j, const int format, const int mt, int panel, int row) {
  const int blocks = num_blocks(j->w->cols);
  const uint8_t *p = block_of(j->w, panel * PANEL, 0);
  const float *x = j->x + row * j->ldx, *sums = j->sums + (format == W4M ? (int64_t)row * blocks : 0);
  const int64_t ldx = j->ldx;
  sums_t acc, s;
  _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++)
    for (int g = 0; g < NUM_GROUPS; g++) acc[m][g] = v_set(0.0f);
  for (int b = 0; b < blocks; b++, x += BLOCK, p += block_bytes(format)) {
    fetch_ahead(format, p);
    _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++)
      for (int g = 0; g < NUM_GROUPS; g++) s[m][g] = v_set(0.0f);
    if (format <= W4M) block_w4(mt, p, x, ldx, s);
    else if (format == W8) block_w8(mt, p, x, ldx, s);
    else if (format == BF16) block_bf16(mt, p, x, ldx, s);
    else block_f32(mt, p, x, ldx, s);
    add_block(format, mt, p + payload_bytes(format), sums + b, blocks, s, acc);
  }
  for (int m = 0; m < mt; m++)
    for (int g = 0; g < NUM_GROUPS; g++) {
      int col = panel * PANEL + g * VL;
      store_vector(j, acc[m][g], row + m, col, j->w->rows - col);
    }
}

typedef void (*tile_fn)(const linear_job *, int panel, int row);

#define TILE(F, MT)                                                                                                   \
  static void tile_##F##_##MT(const linear_job *j, int panel, int row) { tile(j, F, MT, panel, row); }
#if MAX_MT == 8
#define TILES(F) TILE(F, 1) TILE(F, 2) TILE(F, 3) TILE(F, 4) TILE(F, 5) TILE(F, 6) TILE(F, 7) TILE(F, 8)
#define NAMES(F)                                                                                                      \
  { tile_##F##_1, tile_##F##_2, tile_##F##_3, tile_##F##_4, tile_##F##_5, tile_##F##_6, tile_##F##_7, tile_##F##_8 }
#else
#define TILES(F) TILE(F, 1) TILE(F, 2) TILE(F, 3) TILE(F, 4)
#define NAMES(F) { tile_##F##_1, tile_##F##_2, tile_##F##_3, tile_##F##_4 }
#endif
TILES(W4) TILES(W4M) TILES(W8) TILES(BF16) TILES(F32)
static const tile_fn tiles[5][MAX_MT] = {NAMES(W4), NAMES(W4M), NAMES(W8), NAMES(BF16), NAMES(F32)};

/* A chunk: a few panels against one slab of rows. Neighbouring chunks share the slab. */
static void linear_chunk(void *job, int chunk) {
  const linear_job *j = job;
  const tile_fn *fns = tiles[j->w->format];
  int first = (chunk / j->chunks_per_slab) * ROWS_PER_ITEM, panel = (chunk % j->chunks_per_slab) * j->panels_per_chunk;
  int last = first + ROWS_PER_ITEM < j->m ? first + ROWS_PER_ITEM : j->m;
  int end = panel + j->panels_per_chunk < j->panels ? panel + j->panels_per_chunk : j->panels;
  for (; panel < end; panel++)
    for (int row = first; row < last; row += MAX_MT)
      fns[(last - row < MAX_MT ? last - row : MAX_MT) - 1](j, panel, row);
}

/* Sums of x over blocks of 32 columns. */
static void sum_row(const float *x, int blocks, float *out) {
  for (int b = 0; b < blocks; b++, x += BLOCK) {
    vf total = v_load(x);
    for (int i = VL; i < BLOCK; i += VL) total = v_add(total, v_load(x + i));
    out[b] = v_sum(total);
  }
}

typedef struct {
  const float *x;
  float *padded, *sums; /* either may be NULL */
  int64_t ldx;
  int cols, rows;
} prepare_job;

#define PREPARE_ROWS 16
static void prepare_chunk(void *job, int chunk) {
  prepare_job *p = job;
  int blocks = num_blocks(p->cols);
  for (int i = chunk * PREPARE_ROWS; i < (chunk + 1) * PREPARE_ROWS && i < p->rows; i++) {
    const float *x = p->x + i * p->ldx;
    if (p->padded) {
      float *to = p->padded + (int64_t)i * blocks * BLOCK;
      memset(to + (blocks - 1) * BLOCK, 0, BLOCK * 4);
      memcpy(to, x, (size_t)p->cols * 4);
      x = to;
    }
    if (p->sums) sum_row(x, blocks, p->sums + (int64_t)i * blocks);
  }
}

/* Pads x to whole blocks and sums its blocks, where the format needs it. */
static void prepare(linear_job *j) {
  int blocks = num_blocks(j->w->cols), pad = j->w->cols % BLOCK != 0, sum = j->w->format == W4M;
  if (!pad && !sum) return;
  int64_t size = pad ? (int64_t)j->m * blocks * BLOCK : 0;
  float *memory = pool_scratch((uint64_t)(size + (int64_t)sum * j->m * blocks) * sizeof(float));
  prepare_job p = {j->x, pad ? memory : NULL, sum ? memory + size : NULL, j->ldx, j->w->cols, j->m};
  pool_run(prepare_chunk, &p, (j->m + PREPARE_ROWS - 1) / PREPARE_ROWS);
  if (pad) j->x = p.padded, j->ldx = (int64_t)blocks * BLOCK;
  j->sums = p.sums;
}

/* Parts of different formats side by side in out. */
static void linear_stack(const weight_t *w, const float *x, int64_t ldx, int m, float *out, int64_t ldo,
                         const float *bias, const float *add, int64_t lda) {
  const weight_t *const *parts = (const weight_t *const *)w->data;
  for (int i = 0, at = 0; i < w->num_parts; at += parts[i++]->rows)
    ss_linear(parts[i], x, ldx, m, out + at, ldo, bias ? bias + at : NULL, add ? add + at : NULL, lda);
}

void ss_linear(const weight_t *w, const float *x, int64_t ldx, int m, float *out, int64_t ldo, const float *bias,
               const float *add, int64_t lda) {
  if (w->format == STACK) {
    linear_stack(w, x, ldx, m, out, ldo, bias, add, lda);
    return;
  }
  linear_job j = {.w = w, .x = x, .bias = bias, .add = add, .out = out, .ldx = ldx, .ldo = ldo, .lda = lda, .m = m};
  prepare(&j);
  j.panels = num_panels(w->rows);
  int slabs = (m + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM;
  int per_chunk = (int)((int64_t)j.panels * slabs / (pool_threads() * 16));
  j.panels_per_chunk = per_chunk < 1 ? 1 : per_chunk > j.panels ? j.panels : per_chunk;
  j.chunks_per_slab = (j.panels + j.panels_per_chunk - 1) / j.panels_per_chunk;
  pool_run(linear_chunk, &j, slabs * j.chunks_per_slab);
}
