/* out = x w^T (+ bias) (+ add), x in float32, w packed (weight.h).
 *
 * Every output element is computed in one order, whatever the number of rows, the tile and the thread: the order is
 * written in tile_float.h and tile_integer.h. A tile keeps a few rows of x and three vectors of output rows in registers, so a
 * weight is unpacked once for them: verifying a few drafted tokens costs little more than decoding one. Unpacking a block to
 * memory once for many rows pays on machines without byte dots (tile_panel.h); an earlier attempt, with x transposed, gained
 * nothing.
 */
#include "linear.h"

#include <stdlib.h>

#include "pool.h"
#include "tile_amx.h"
#include "tile_byte.h"
#include "tile_dot.h"
#include "tile_float.h"
#include "tile_panel.h"

typedef void (*tile_fn)(const linear_job *, int panel, int row);

/* The tile of up to four rows, and of more; for CODES6 in how many sums a block is added up there (FOLDS). */
#ifdef HAS_WORD_DOT
#define TILE_FEW tile_dot
#define TILE_MANY tile_word
#elif defined(HAS_DOT)
#define TILE_FEW tile_dot
#define TILE_MANY tile_dot
#elif defined(HAS_WORDS)
#define TILE_FEW tile_few
#define TILE_MANY tile_word
INLINE void tile_few(const linear_job *j, const int kind, const int halves, const int mt, int panel, int row) {
  if (mt == 1 && takes_bytes(kind)) tile_byte(j, kind, halves, panel, row);
  else tile_word(j, kind, halves, mt, panel, row);
}
#else
#define TILE_FEW tile_float
#define TILE_MANY tile_float
#endif
#if defined(HAS_DOT) || !defined(HAS_WORDS) || WORD_MT < MAX_MT
#define FEW_SUMS 2
#else
#define FEW_SUMS 1
#endif
#if WORD_MT == MAX_MT && (defined(HAS_WORD_DOT) || (defined(HAS_WORDS) && !defined(HAS_DOT)))
#define MANY_SUMS 1
#else
#define MANY_SUMS 2
#endif
INLINE int quantizes_x(int format) {
#ifdef HAS_WORDS
  return has_scales(format);
#else
  return (void)format, 0;
#endif
}

/* A family: a kind of codes, and groups of 32 columns or of 16. */
#define TILE(F, TILE_OF, KIND, HALVES_, MT)                                                                           \
  static void tile_##F##_##MT(const linear_job *j, int panel, int row) { TILE_OF(j, KIND, HALVES_, MT, panel, row); }
#define TILES_TO_4(F, T, K, H) TILE(F, T, K, H, 1) TILE(F, T, K, H, 2) TILE(F, T, K, H, 3) TILE(F, T, K, H, 4)
#if MAX_MT == 8
#define TILES(F, T, MANY, K, H, HM)                                                                                   \
  TILES_TO_4(F, T, K, H) TILE(F, MANY, K, HM, 5) TILE(F, MANY, K, HM, 6) TILE(F, MANY, K, HM, 7) TILE(F, MANY, K, HM, 8)
#define NAMES(F)                                                                                                      \
  { tile_##F##_1, tile_##F##_2, tile_##F##_3, tile_##F##_4, tile_##F##_5, tile_##F##_6, tile_##F##_7, tile_##F##_8 }
#elif MAX_MT == 6
#define TILES(F, T, MANY, K, H, HM) TILES_TO_4(F, T, K, H) TILE(F, MANY, K, HM, 5) TILE(F, MANY, K, HM, 6)
#define NAMES(F) { tile_##F##_1, tile_##F##_2, tile_##F##_3, tile_##F##_4, tile_##F##_5, tile_##F##_6 }
#else
#define TILES(F, T, MANY, K, H, HM) TILES_TO_4(F, T, K, H)
#define NAMES(F) { tile_##F##_1, tile_##F##_2, tile_##F##_3, tile_##F##_4 }
#endif
#if FLOAT_MT == 4
#define FLOAT_TILES(KIND) TILES_TO_4(KIND, tile_float, KIND, 1)
#define FLOAT_NAMES(F) { tile_##F##_1, tile_##F##_2, tile_##F##_3, tile_##F##_4 }
#else
#define FLOAT_TILES(KIND) TILES(KIND, tile_float, tile_float, KIND, 1, 1)
#define FLOAT_NAMES(F) NAMES(F)
#endif
#define WHOLE_TILES(KIND) TILES(KIND, TILE_FEW, TILE_MANY, KIND, 1, 1)
#define HALF_TILES(KIND) TILES(KIND##_HALVES, TILE_FEW, TILE_MANY, KIND, 2, 2)
WHOLE_TILES(CODES4) WHOLE_TILES(TABLE4) WHOLE_TILES(CODES5) WHOLE_TILES(CODES8)
HALF_TILES(CODES4) HALF_TILES(TABLE4) HALF_TILES(CODES8)
TILES(CODES6, TILE_FEW, TILE_MANY, CODES6, FEW_SUMS, MANY_SUMS)
FLOAT_TILES(BF16) FLOAT_TILES(F32)

/* By kind of codes, and with HALVES. No type has groups of 16 with 5 bits, or of 32 with 6. */
static const tile_fn tiles[2 * 8][MAX_MT] = {
    [CODES4] = NAMES(CODES4), [TABLE4] = NAMES(TABLE4), [CODES5] = NAMES(CODES5), [CODES8] = NAMES(CODES8),
    [BF16] = FLOAT_NAMES(BF16), [F32] = FLOAT_NAMES(F32),
    [HALVES | CODES4] = NAMES(CODES4_HALVES), [HALVES | TABLE4] = NAMES(TABLE4_HALVES),
    [HALVES | CODES6] = NAMES(CODES6), [HALVES | CODES8] = NAMES(CODES8_HALVES)};
/* Rows of a full tile. */
INLINE int tile_rows(const linear_job *j) { return has_scales(j->w->format) ? MAX_MT : FLOAT_MT; }
INLINE const tile_fn *tiles_of(const linear_job *j) { return tiles[j->w->format & (7 | HALVES)]; }

#ifdef HAS_AMX
#define AMX(K) static void amx_##K(const linear_job *j, int panel, int row) { tile_amx(j, K, panel, row); }
AMX(CODES4) AMX(TABLE4) AMX(CODES5) AMX(CODES8)
static const tile_fn amx_tiles[] = {[CODES4] = amx_CODES4, [TABLE4] = amx_TABLE4, [CODES5] = amx_CODES5, [CODES8] = amx_CODES8};
INLINE int uses_amx(const linear_job *j) { return j->parts && !(j->w->format & HALVES) && amx_allowed(); }
INLINE tile_fn full_tile(const linear_job *j) {
  return uses_amx(j) ? amx_tiles[kind_of(j->w->format)] : tiles_of(j)[tile_rows(j) - 1];
}
#else
INLINE int uses_amx(const linear_job *j) { return (void)j, 0; }
INLINE tile_fn full_tile(const linear_job *j) { return tiles_of(j)[tile_rows(j) - 1]; }
INLINE void amx_begin(void) {}
INLINE void amx_end(void) {}
#endif

/* Whether all rows are multiplied by tile_panel(). */
#ifdef HAS_PANELS
INLINE int by_panels(const linear_job *j) { return j->m >= panel_min_rows(kind_of(j->w->format)); }
#else
INLINE int by_panels(const linear_job *j) { return (void)j, 0; }
INLINE void tile_panel(const linear_job *j, int panel, int first, int last) { (void)j, (void)panel, (void)first, (void)last; }
#endif

/* A chunk: a few panels against one slab of rows. Neighbouring chunks share the slab. */
static void linear_chunk(const linear_job *j, int chunk) {
  const tile_fn *fns = tiles_of(j), full = full_tile(j);
  int first = (chunk / j->chunks_per_slab) * ROWS_PER_ITEM, panel = (chunk % j->chunks_per_slab) * j->panels_per_chunk;
  int last = first + ROWS_PER_ITEM < j->m ? first + ROWS_PER_ITEM : j->m;
  int end = panel + j->panels_per_chunk < j->panels ? panel + j->panels_per_chunk : j->panels;
  if (by_panels(j)) {
    for (; panel < end; panel++) tile_panel(j, panel, first, last);
    return;
  }
  const int rows = tile_rows(j), matrix_unit = last - first >= rows && full != fns[rows - 1];
  if (matrix_unit) amx_begin();
  for (; panel < end; panel++)
    for (int row = first; row < last; row += rows)
      (last - row < rows ? fns[last - row - 1] : full)(j, panel, row);
  if (matrix_unit) amx_end();
}

/* ---- x, as the tiles take it ---- */

/* Sums of x over blocks of 32 columns and their halves. */
static void sum_row(const float *x, int blocks, float *out) {
  for (int b = 0; b < blocks; b++, out += NUM_SUMS) {
    for (int half = 0; half < 2; half++, x += BLOCK / 2) {
      vf total = v_load(x);
      for (int i = VL; i < BLOCK / 2; i += VL) total = v_add(total, v_load(x + i));
      out[half] = v_sum(total);
    }
    out[WHOLE] = out[0] + out[1];
  }
}

#ifdef HAS_WORDS
/* Whether a group of so many rows is multiplied as words. */
static int takes_words(const linear_job *j, int group) {
#ifdef HAS_DOT
#ifdef HAS_WORD_DOT
  return group == MAX_MT ? !uses_amx(j) : group > 4;
#endif
  return 0;
#endif
#ifdef HAS_BYTES
  return group > 1 || by_panels(j) || !takes_bytes(kind_of(j->w->format));
#endif
  return (void)j, (void)group, 1;
}

/* Row i of x as the tile takes it. */
static void store_parts(const linear_job *j, int i, int8_t *parts, const int32_t *v) {
  const int first = i - i % MAX_MT, group = j->m - first < MAX_MT ? j->m - first : MAX_MT;
  if (takes_words(j, group)) {
    store_words(v, (int16_t *)parts + (i - first) * BLOCK);
    return;
  }
#ifdef HAS_DOT
  int8_t *high = parts + (i - first) * BLOCK;
  split_bytes(v, high, high + group * BLOCK);
#elif defined(HAS_BYTES)
  store_row_bytes(v, parts);
#endif
}

static void quantize_row(const linear_job *j, int i, int blocks, const float *x) {
  for (int b = 0; b < blocks; b++) {
    int32_t v[BLOCK];
    quantize_block(x + b * BLOCK, v, j->x_blocks + (int64_t)i * blocks + b);
    store_parts(j, i, parts_of(j->parts, blocks, i, b), v);
  }
}
#else
static void quantize_row(const linear_job *j, int i, int blocks, const float *x) {
  (void)j, (void)i, (void)blocks, (void)x;
}
static int takes_words(const linear_job *j, int group) { return (void)j, (void)group, 0; }
#endif

static const float *copy_row(const linear_job *j, int i, int blocks) {
  const int cols = j->w->cols;
  const int32_t *order = j->w->order;
  const float *x = j->x + i * j->ldx;
  float *to = j->copy + (int64_t)i * blocks * BLOCK;
  memset(to + (blocks - 1) * BLOCK, 0, BLOCK * 4);
  if (!order) memcpy(to, x, (size_t)cols * 4);
  else
    for (int k = 0; k < cols; k++) to[k] = x[order[k]];
  return to;
}

static void prepare_row(const linear_job *j, int i) {
  const int blocks = num_blocks(j->w->cols);
  const float *x = j->copy ? copy_row(j, i, blocks) : j->x + i * j->ldx;
  if (j->parts) quantize_row(j, i, blocks, x);
  if (j->sums) sum_row(x, blocks, j->sums + (int64_t)i * blocks * NUM_SUMS);
}

#define PREPARE_ROWS 4
static void prepare_chunk(const linear_job *j, int chunk) {
  for (int i = chunk * PREPARE_ROWS; i < (chunk + 1) * PREPARE_ROWS && i < j->m; i++) prepare_row(j, i);
}

/* What the format's tile wants of x: its bytes or words, or whole blocks and their sums. */
static int needs_copy(const linear_job *j) { return j->w->cols % BLOCK != 0 || j->w->order; }
static int needs_sums(const linear_job *j) { return (j->w->format & HAS_MINIMUM) && !quantizes_x(j->w->format); }

static uint64_t whole_groups(int rows) { return (uint64_t)(rows + MAX_MT - 1) / MAX_MT * MAX_MT; }

/* Memory for it, of which place() hands out the parts. */
static uint64_t prepared_bytes(const linear_job *j) {
  const uint64_t n = whole_groups(j->m) * (uint64_t)num_blocks(j->w->cols);
  uint64_t bytes = quantizes_x(j->w->format) ? n * (PARTS_BYTES + sizeof(x_block)) : 0;
  if (needs_copy(j)) bytes += n * BLOCK * 4;
  if (needs_sums(j)) bytes += n * NUM_SUMS * 4;
  return (bytes + 63) / 64 * 64;
}

static void place(linear_job *j, uint8_t *memory) {
  const uint64_t n = whole_groups(j->m) * (uint64_t)num_blocks(j->w->cols);
  if (needs_copy(j)) j->copy = (float *)memory, memory += n * BLOCK * 4;
  if (needs_sums(j)) j->sums = (float *)memory;
  if (quantizes_x(j->w->format)) j->parts = (int8_t *)memory, j->x_blocks = (x_block *)(memory + n * PARTS_BYTES);
}

/* Parts of a stack take the same x: what one has prepared serves the next. */
static int can_share(const linear_job *j, const linear_job *before) {
  return j->x == before->x && j->ldx == before->ldx && j->m == before->m && j->w->cols == before->w->cols &&
         j->w->order == before->w->order && quantizes_x(j->w->format) && quantizes_x(before->w->format) &&
         (j->w->format & HALVES) == (before->w->format & HALVES) && /* the matrix unit takes one of them alone */
         (j->m % MAX_MT != 1 || takes_words(j, 1) == takes_words(before, 1)); /* of one row it depends on the kind */
}

/* ---- jobs ---- */

typedef struct {
  linear_job *jobs;
  int num_jobs;
} job_list;

static const linear_job *job_of(const job_list *list, int item, int preparing, int *chunk) {
  int low = 0, high = list->num_jobs - 1;
  while (low < high) {
    int mid = (low + high + 1) / 2, first = preparing ? list->jobs[mid].prepare0 : list->jobs[mid].chunk0;
    if (first <= item) low = mid;
    else high = mid - 1;
  }
  *chunk = item - (preparing ? list->jobs[low].prepare0 : list->jobs[low].chunk0);
  return list->jobs + low;
}

static void prepare_item(void *list, int item) {
  int chunk;
  const linear_job *j = job_of(list, item, 1, &chunk);
  prepare_chunk(j, chunk);
}

static void linear_item(void *list, int item) {
  int chunk;
  const linear_job *j = job_of(list, item, 0, &chunk);
  linear_chunk(j, chunk);
}

static void prepare_all(const job_list *list) {
  uint64_t bytes = 0;
  int items = 0;
  for (int i = 0; i < list->num_jobs; i++) bytes += prepared_bytes(list->jobs + i);
  if (!bytes) return;
  uint8_t *memory = pool_scratch(bytes);
  for (int i = 0; i < list->num_jobs; i++) {
    linear_job *j = list->jobs + i;
    const uint64_t own = prepared_bytes(j);
    j->prepare0 = items;
    if (i && can_share(j, j - 1)) {
      j->parts = j[-1].parts, j->x_blocks = j[-1].x_blocks;
      continue;
    }
    place(j, memory);
    memory += own;
    items += own ? (j->m + PREPARE_ROWS - 1) / PREPARE_ROWS : 0;
  }
  pool_run(prepare_item, (void *)list, items);
  for (int i = 0; i < list->num_jobs; i++) {
    linear_job *j = list->jobs + i;
    if (j->copy) j->x = j->copy, j->ldx = (int64_t)num_blocks(j->w->cols) * BLOCK;
  }
}

static void run_all(const job_list *list) {
  int64_t work = 0;
  int items = 0;
  for (int i = 0; i < list->num_jobs; i++) work += (int64_t)list->jobs[i].panels * list->jobs[i].slabs;
  int per_chunk = (int)(work / (pool_threads() * 16));
  for (int i = 0; i < list->num_jobs; i++) {
    linear_job *j = list->jobs + i;
    j->panels_per_chunk = per_chunk < 1 ? 1 : per_chunk > j->panels ? j->panels : per_chunk;
    j->chunks_per_slab = (j->panels + j->panels_per_chunk - 1) / j->panels_per_chunk;
    j->chunk0 = items;
    items += j->slabs * j->chunks_per_slab;
  }
  pool_run(linear_item, (void *)list, items);
}

static linear_job job_for(const linear_call *c, const weight_t *w, int at) {
  linear_job j = {.w = w, .x = c->x, .ldx = c->ldx, .m = c->m, .out = c->out + at, .ldo = c->ldo, .lda = c->lda};
  j.bias = c->bias ? c->bias + at : NULL;
  j.add = c->add ? c->add + at : NULL;
  j.panels = num_panels(w->rows);
  j.fetch = fetching_pays();
  j.slabs = (c->m + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM;
  return j;
}

/* Of a STACK one job for each part, side by side in out. Returns how many there are now. */
static int add_jobs(const linear_call *c, linear_job *jobs, int n) {
  if (c->w->format != STACK) {
    jobs[n] = job_for(c, c->w, 0);
    return n + 1;
  }
  const weight_t *const *parts = (const weight_t *const *)c->w->data;
  for (int i = 0, at = 0; i < c->w->num_parts; at += parts[i++]->rows) jobs[n++] = job_for(c, parts[i], at);
  return n;
}

static int num_jobs_of(const weight_t *w) { return w->format == STACK ? w->num_parts : 1; }

void linear_many(const linear_call *calls, int num_calls) {
  static linear_job *jobs;
  static int have;
  int need = 0;
  for (int i = 0; i < num_calls; i++) need += num_jobs_of(calls[i].w);
  if (need > have) {
    free(jobs);
    if (!(jobs = malloc((size_t)need * sizeof *jobs))) abort();
    have = need;
  }
  job_list list = {jobs, 0};
  for (int i = 0; i < num_calls; i++)
    if (calls[i].m > 0) list.num_jobs = add_jobs(calls + i, jobs, list.num_jobs);
  prepare_all(&list);
  run_all(&list);
}

void ss_linear(const weight_t *w, const float *x, int64_t ldx, int m, float *out, int64_t ldo, const float *bias,
               const float *add, int64_t lda) {
  const linear_call call = {w, x, out, bias, add, ldx, ldo, lda, m};
  linear_many(&call, 1);
}
