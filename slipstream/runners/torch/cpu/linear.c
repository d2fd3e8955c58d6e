/* out = x w^T (+ bias) (+ add), x in float32, w packed (weight.h).
 *
 * Every output element is computed in one order, whatever the number of rows, the tile and the thread: the order is
 * written in tile_float.h and tile_dot.h. A tile keeps MT rows of x and three vectors of output rows in registers, so a
 * weight is unpacked once for MT rows: verifying a few drafted tokens costs little more than decoding one. (Unpacking a
 * block to memory once for many rows, with x transposed, was measured for prefill and gained nothing.)
 */
#include "linear.h"

#include <stdlib.h>

#include "pool.h"
#include "tile_amx.h"
#include "tile_dot.h"
#include "tile_float.h"

#define ROWS_PER_ITEM 64 /* rows of x that meet one panel while it is in the nearest cache */

typedef void (*tile_fn)(const linear_job *, int panel, int row);

#ifdef HAS_DOT
#define KIND(F) KIND_##F
#define KIND_W4 tile_dot
#define KIND_W4M tile_dot
#define KIND_W8 tile_dot
#define KIND_BF16 tile_float
#define KIND_F32 tile_float
INLINE int rounds_x(int format) { return format <= W8; }
#else
#define KIND(F) tile_float
INLINE int rounds_x(int format) { return (void)format, 0; }
#endif

#define TILE(F, MT)                                                                                                   \
  static void tile_##F##_##MT(const linear_job *j, int panel, int row) { KIND(F)(j, F, MT, panel, row); }
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

#ifdef HAS_AMX
#define AMX(F) static void amx_##F(const linear_job *j, int panel, int row) { tile_amx(j, F, panel, row); }
AMX(W4) AMX(W4M) AMX(W8)
static const tile_fn amx_tiles[3] = {amx_W4, amx_W4M, amx_W8};
INLINE tile_fn full_tile(const linear_job *j) {
  return j->parts && amx_allowed() ? amx_tiles[j->w->format] : tiles[j->w->format][MAX_MT - 1];
}
#else
INLINE tile_fn full_tile(const linear_job *j) { return tiles[j->w->format][MAX_MT - 1]; }
INLINE void amx_begin(void) {}
INLINE void amx_end(void) {}
#endif

/* A chunk: a few panels against one slab of rows. Neighbouring chunks share the slab. */
static void linear_chunk(void *job, int chunk) {
  const linear_job *j = job;
  const tile_fn *fns = tiles[j->w->format], full = full_tile(j);
  int first = (chunk / j->chunks_per_slab) * ROWS_PER_ITEM, panel = (chunk % j->chunks_per_slab) * j->panels_per_chunk;
  int last = first + ROWS_PER_ITEM < j->m ? first + ROWS_PER_ITEM : j->m;
  int end = panel + j->panels_per_chunk < j->panels ? panel + j->panels_per_chunk : j->panels;
  const int matrix_unit = last - first >= MAX_MT && full != fns[MAX_MT - 1];
  if (matrix_unit) amx_begin();
  for (; panel < end; panel++)
    for (int row = first; row < last; row += MAX_MT)
      (last - row < MAX_MT ? fns[last - row - 1] : full)(j, panel, row);
  if (matrix_unit) amx_end();
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
  linear_job *j;
  float *padded, *sums; /* each may be NULL */
  int8_t *parts;
  block_facts *facts;
} prepare_job;

#ifdef HAS_DOT
static void round_row(const prepare_job *p, int i, int blocks, const float *x) {
  const int first = i - i % MAX_MT, group = p->j->m - first < MAX_MT ? p->j->m - first : MAX_MT;
  for (int b = 0; b < blocks; b++) {
    int8_t *high = parts_of(p->parts, blocks, i, b) + (i - first) * BLOCK;
    block_facts *facts = p->facts + (int64_t)i * blocks + b;
    round_block(x + b * BLOCK, offset_of(p->j->w->format), high, high + group * BLOCK, facts);
  }
}
#else
static void round_row(const prepare_job *p, int i, int blocks, const float *x) { (void)p, (void)i, (void)blocks, (void)x; }
#endif

static void prepare_row(const prepare_job *p, int i) {
  const int cols = p->j->w->cols, blocks = num_blocks(cols);
  const float *x = p->j->x + i * p->j->ldx;
  const int64_t at = (int64_t)i * blocks;
  if (p->parts) round_row(p, i, blocks, x);
  if (p->padded) {
    float *to = p->padded + at * BLOCK;
    memset(to + (blocks - 1) * BLOCK, 0, BLOCK * 4);
    memcpy(to, x, (size_t)cols * 4);
    x = to;
  }
  if (p->sums) sum_row(x, blocks, p->sums + at);
}

#define PREPARE_ROWS 16
static void prepare_chunk(void *job, int chunk) {
  const prepare_job *p = job;
  for (int i = chunk * PREPARE_ROWS; i < (chunk + 1) * PREPARE_ROWS && i < p->j->m; i++) prepare_row(p, i);
}

/* What the format's tile wants of x: its bytes, or whole blocks and their sums. Block formats have whole blocks. */
static void prepare(linear_job *j) {
  const int format = j->w->format, pad = j->w->cols % BLOCK != 0, round = rounds_x(format), sum = format == W4M && !round;
  const uint64_t whole = (uint64_t)(j->m + MAX_MT - 1) / MAX_MT * MAX_MT; /* rows, in whole groups */
  const uint64_t n = whole * (uint64_t)num_blocks(j->w->cols);
  if (!pad && !sum && !round) return;
  uint8_t *memory = pool_scratch(n * (pad ? BLOCK * 4 : PARTS_BYTES + sizeof(block_facts)));
  prepare_job p = {.j = j};
  if (round) p.parts = (int8_t *)memory, p.facts = (block_facts *)(memory + n * PARTS_BYTES);
  if (pad) p.padded = (float *)memory;
  if (sum) p.sums = (float *)memory;
  pool_run(prepare_chunk, &p, (j->m + PREPARE_ROWS - 1) / PREPARE_ROWS);
  if (pad) j->x = p.padded, j->ldx = (int64_t)num_blocks(j->w->cols) * BLOCK;
  j->sums = p.sums, j->parts = p.parts, j->facts = p.facts;
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
