/* Causal attention over paged keys and values, grouped heads.
 *
 * The order of every sum depends on the token's own position only: its keys are divided into segments of SEGMENT
 * positions counted from 0; a segment yields (maximum, sum, weighted values), and segments are folded from the left.
 * So a token has the same bits alone, in a draft row or in a prefill chunk.
 *
 * Neighbouring tokens of one slot form a run; a run's tokens and the query heads of one KV head share each key tile
 * (transposed once, lanes are positions) and each value load. Long contexts with few tokens are also split by
 * segment over the threads.
 *
 * Caches in codes (kv_codes.h): keys are decoded as they are transposed, the values of a segment before they are weighed.
 * So the bits are those of a cache with the decoded numbers.
 */
#include "attention.h"

#include <stdlib.h>

#include "elementwise.h"
#include "kv_codes.h"
#include "pool.h"
#include "simd.h"

#define SEGMENT 128
#define TILE 16 /* positions whose keys are transposed together; a multiple of VL */
#define MAX_RUN 8 /* tokens */
#define MAX_ROWS 64 /* tokens of a run times query heads of a KV head */
#define ROW_STEP 4 /* rows of scores in registers */

typedef struct {
  int first, num_tokens, segments, item0;
} run_t;

typedef struct {
  const attend_args *a;
  run_t *runs;
  int num_runs, split, max_segments;
  float *partial; /* [num_tokens, num_heads, max_segments, dim + 2], only when split */
} attend_job;

/* What one thread needs for a segment of a run. */
typedef struct {
  float keys[MAX_HEAD_DIM * TILE]; /* [dim, TILE] */
  float scores[MAX_ROWS * SEGMENT]; /* scores, then weights */
  float values[MAX_ROWS * MAX_HEAD_DIM]; /* weighted values of this segment */
  float folded[MAX_ROWS * MAX_HEAD_DIM]; /* of the segments so far */
  float top[MAX_ROWS], sum[MAX_ROWS], folded_top[MAX_ROWS], folded_sum[MAX_ROWS];
  int64_t offset[SEGMENT]; /* of each position's key and value in the caches */
  int64_t scale_at[SEGMENT], own[SEGMENT]; /* coded: of their scales, and of the decoded values */
  const float *q[MAX_ROWS];
  int count[MAX_ROWS]; /* positions of this segment that the row sees; <= 0: none */
  int num_rows;
} work_t;

/* ---- scores ---- */

static void transpose_tile(const float *cache, const int64_t *offset, int dim, float *keys) {
  for (int i = 0; i < TILE; i += VL)
    for (int d = 0; d < dim; d += VL) {
      vf r[VL];
      for (int j = 0; j < VL; j++) r[j] = v_load(cache + offset[i + j] + d);
      v_transpose(r);
      for (int j = 0; j < VL; j++) v_store(keys + (d + j) * TILE + i, r[j]);
    }
}

static void transpose_codes(const uint8_t *cache, const int64_t *offset, const int64_t *scale_at, int dim, float *keys) {
  for (int i = 0; i < TILE; i += VL) {
    float scale[VL];
    for (int j = 0; j < VL; j++) scale[j] = load_scale(cache + scale_at[i + j]);
    for (int d = 0; d < dim; d += VL) {
      vf r[VL];
      for (int j = 0; j < VL; j++) r[j] = v_decode(cache + offset[i + j] + d, factor_of(scale[j]));
      v_transpose(r);
      for (int j = 0; j < VL; j++) v_store(keys + (d + j) * TILE + i, r[j]);
    }
  }
}

/* Scores of n rows against one vector of positions. Two chains a row, even and odd elements, hide the latency. */
INLINE void score_rows(const int n, const float *const *q, const float *keys, int dim, float scale, float *out) {
  vf even[ROW_STEP], odd[ROW_STEP];
  _Pragma("GCC unroll 4") for (int r = 0; r < n; r++) even[r] = odd[r] = v_set(0.0f);
  for (int d = 0; d < dim; d += 2) {
    vf k0 = v_load(keys + d * TILE), k1 = v_load(keys + (d + 1) * TILE);
    _Pragma("GCC unroll 4") for (int r = 0; r < n; r++) {
      even[r] = v_fma(v_set(q[r][d]), k0, even[r]);
      odd[r] = v_fma(v_set(q[r][d + 1]), k1, odd[r]);
    }
  }
  _Pragma("GCC unroll 4") for (int r = 0; r < n; r++)
    v_store(out + r * SEGMENT, v_mul(v_add(even[r], odd[r]), v_set(scale)));
}

static void score_tile(work_t *w, int dim, float scale, int at) {
  for (int i = 0; i < TILE; i += VL)
    for (int r = 0; r < w->num_rows; r += ROW_STEP) {
      float *out = w->scores + r * SEGMENT + at + i;
      const float *const *q = w->q + r;
      switch (w->num_rows - r) {
        case 1: score_rows(1, q, w->keys + i, dim, scale, out); break;
        case 2: score_rows(2, q, w->keys + i, dim, scale, out); break;
        case 3: score_rows(3, q, w->keys + i, dim, scale, out); break;
        default: score_rows(4, q, w->keys + i, dim, scale, out);
      }
    }
}

/* Scores of a row become weights; positions it does not see become 0. */
static void soften(work_t *w, int row) {
  int n = w->count[row], end = (n + VL - 1) / VL * VL;
  float *s = w->scores + row * SEGMENT;
  for (int i = n; i < end; i++) s[i] = -3.0e38f;
  vf top = v_load(s), total = v_set(0.0f);
  for (int i = VL; i < end; i += VL) top = v_max(top, v_load(s + i));
  w->top[row] = v_hmax(top);
  top = v_set(w->top[row]);
  for (int i = 0; i < end; i += VL) {
    vf e = v_exp(v_sub(v_load(s + i), top));
    v_store(s + i, e);
    total = v_add(total, e);
  }
  w->sum[row] = v_sum(total);
}

/* ---- values ---- */

/* values[row][d ...] += weight * value for positions from .. to, n rows, c vectors of the head. */
INLINE void weigh(const int n, const int c, work_t *w, const float *cache, const int64_t *offset, int dim, int row, int d,
                  int from, int to) {
  vf acc[ROW_STEP][4];
  float *out = w->values + row * dim + d;
  _Pragma("GCC unroll 4") for (int r = 0; r < n; r++)
    _Pragma("GCC unroll 4") for (int i = 0; i < c; i++) acc[r][i] = from ? v_load(out + r * dim + i * VL) : v_set(0.0f);
  for (int p = from; p < to; p++) {
    const float *v = cache + offset[p] + d;
    vf value[4];
    _Pragma("GCC unroll 4") for (int i = 0; i < c; i++) value[i] = v_load(v + i * VL);
    _Pragma("GCC unroll 4") for (int r = 0; r < n; r++) {
      vf weight = v_set(w->scores[(row + r) * SEGMENT + p]);
      _Pragma("GCC unroll 4") for (int i = 0; i < c; i++) acc[r][i] = v_fma(weight, value[i], acc[r][i]);
    }
  }
  _Pragma("GCC unroll 4") for (int r = 0; r < n; r++)
    _Pragma("GCC unroll 4") for (int i = 0; i < c; i++) v_store(out + r * dim + i * VL, acc[r][i]);
}

#if VL == 16
#define WIDE 4
#else
#define WIDE 2
#endif

static void weigh_rows(int n, work_t *w, const float *cache, const int64_t *offset, int dim, int row, int from, int to) {
  for (int d = 0; d < dim;) {
    int wide = d + WIDE * VL <= dim;
    if (n == ROW_STEP && wide) weigh(ROW_STEP, WIDE, w, cache, offset, dim, row, d, from, to);
    else if (n == 3 && wide) weigh(3, WIDE, w, cache, offset, dim, row, d, from, to);
    else if (wide)
      for (int r = 0; r < n; r++) weigh(1, WIDE, w, cache, offset, dim, row + r, d, from, to);
    else
      for (int r = 0; r < n; r++) weigh(1, 1, w, cache, offset, dim, row + r, d, from, to);
    d += wide ? WIDE * VL : VL;
  }
}

/* Rows share the positions that all of them see; the others are added for each row alone, in the same order. */
/* offset: of each position's values in the cache. */
static void weigh_all(work_t *w, const float *cache, const int64_t *offset, int dim) {
  for (int row = 0; row < w->num_rows; row += ROW_STEP) {
    int n = w->num_rows - row < ROW_STEP ? w->num_rows - row : ROW_STEP, common = SEGMENT;
    for (int r = 0; r < n; r++) common = w->count[row + r] < common ? w->count[row + r] : common;
    if (common < 0) common = 0;
    weigh_rows(n, w, cache, offset, dim, row, 0, common);
    for (int r = 0; r < n; r++)
      if (w->count[row + r] > common) weigh_rows(1, w, cache, offset, dim, row + r, common, w->count[row + r]);
  }
}

/* ---- segments ---- */

static int row_count(const attend_args *a, int token, int segment) {
  int n = a->positions[token] + 1 - segment * SEGMENT;
  return n < SEGMENT ? n : SEGMENT;
}

/* Where each position of the segment lies; positions that no row sees point at the first, which exists. */
static void find_positions(const attend_job *j, work_t *w, const run_t *run, int kv_head, int segment, int seen) {
  const attend_args *a = j->a;
  const int32_t *table = a->block_table + (int64_t)a->token_slot[run->first] * a->max_blocks;
  for (int i = 0; i < SEGMENT; i++) {
    int pos = segment * SEGMENT + (i < seen ? i : 0);
    int64_t block = table[pos / a->block_size];
    w->offset[i] = ((block * a->num_kv_heads + kv_head) * a->block_size + pos % a->block_size) * a->dim;
  }
}

static void find_codes(const attend_job *j, work_t *w, const run_t *run, int kv_head, int segment, int seen) {
  const attend_args *a = j->a;
  const int32_t *table = a->block_table + (int64_t)a->token_slot[run->first] * a->max_blocks;
  int rows = a->num_kv_heads * a->block_size;
  for (int i = 0; i < SEGMENT; i++) {
    int pos = segment * SEGMENT + (i < seen ? i : 0), row = kv_head * a->block_size + pos % a->block_size;
    int64_t start = table[pos / a->block_size] * coded_block_bytes(rows, a->dim);
    w->offset[i] = start + (int64_t)row * a->dim;
    w->scale_at[i] = start + scale_offset(rows, a->dim, row);
    w->own[i] = (int64_t)i * a->dim;
  }
}

/* Blocks of a cache lie scattered: no hardware prefetcher follows them. */
static void fetch_rows(const float *cache, const int64_t *offset, int n, int dim) {
  for (int i = 0; i < n; i++)
    for (int d = 0; d < dim; d += 16) __builtin_prefetch(cache + offset[i] + d, 0, 3);
}

static void fetch_codes(const uint8_t *cache, const int64_t *offset, int n, int dim) {
  for (int i = 0; i < n; i++)
    for (int d = 0; d < dim; d += 64) __builtin_prefetch(cache + offset[i] + d, 0, 3);
}

static void score_floats(const attend_args *a, work_t *w, int seen) {
  fetch_rows(a->k_cache, w->offset, TILE, a->dim);
  for (int at = 0; at < seen; at += TILE) {
    if (at + TILE < seen) fetch_rows(a->k_cache, w->offset + at + TILE, TILE, a->dim);
    fetch_rows(a->v_cache, w->offset + at, TILE, a->dim);
    transpose_tile(a->k_cache, w->offset + at, a->dim, w->keys);
    score_tile(w, a->dim, a->scale, at);
  }
}

static void score_codes(const attend_args *a, work_t *w, int seen) {
  fetch_codes(a->k_cache, w->offset, TILE, a->dim);
  for (int at = 0; at < seen; at += TILE) {
    if (at + TILE < seen) fetch_codes(a->k_cache, w->offset + at + TILE, TILE, a->dim);
    fetch_codes(a->v_cache, w->offset + at, TILE, a->dim);
    transpose_codes(a->k_cache, w->offset + at, w->scale_at + at, a->dim, w->keys);
    score_tile(w, a->dim, a->scale, at);
  }
}

/* The values of a segment as floats, a position after the other. */
static void decode_values(const attend_args *a, work_t *w, int seen, float *decoded) {
  const uint8_t *cache = a->v_cache;
  for (int i = 0; i < seen; i++)
    decode_row(cache + w->offset[i], load_scale(cache + w->scale_at[i]), a->dim, decoded + w->own[i]);
}

static void run_segment(const attend_job *j, work_t *w, const run_t *run, int kv_head, int segment) {
  const attend_args *a = j->a;
  int heads = a->num_heads / a->num_kv_heads, seen = 0;
  w->num_rows = run->num_tokens * heads;
  for (int r = 0; r < w->num_rows; r++) {
    int token = run->first + r / heads;
    w->q[r] = a->q + ((int64_t)token * a->num_heads + kv_head * heads + r % heads) * a->dim;
    w->count[r] = row_count(a, token, segment);
    seen = w->count[r] > seen ? w->count[r] : seen;
  }
  if (a->coded) {
    find_codes(j, w, run, kv_head, segment, seen);
    score_codes(a, w, seen);
  } else {
    find_positions(j, w, run, kv_head, segment, seen);
    score_floats(a, w, seen);
  }
  for (int r = 0; r < w->num_rows; r++)
    if (w->count[r] > 0) soften(w, r);
  if (a->coded) {
    float *decoded = (float *)(w + 1);
    decode_values(a, w, seen, decoded);
    weigh_all(w, decoded, w->own, a->dim);
  } else weigh_all(w, a->v_cache, w->offset, a->dim);
}

/* (top, sum, out) of the segments so far, joined with one more. */
static void fold(float *top, float *sum, float *out, float new_top, float new_sum, const float *values, int dim) {
  float lanes[VL], high = *top > new_top ? *top : new_top;
  v_store(lanes, v_exp(v_set(*top - high)));
  float keep = lanes[0];
  v_store(lanes, v_exp(v_set(new_top - high)));
  float take = lanes[0];
  *sum = *sum * keep + new_sum * take;
  *top = high;
  for (int d = 0; d < dim; d += VL)
    v_store(out + d, v_fma(v_load(values + d), v_set(take), v_mul(v_load(out + d), v_set(keep))));
}

static void finish(const float *folded, float sum, int dim, float *out) {
  vf inverse = v_set(1.0f / sum);
  for (int d = 0; d < dim; d += VL) v_store(out + d, v_mul(v_load(folded + d), inverse));
}

static int64_t row_of(const attend_args *a, const run_t *run, int kv_head, int r) {
  int heads = a->num_heads / a->num_kv_heads;
  return (int64_t)(run->first + r / heads) * a->num_heads + kv_head * heads + r % heads;
}

/* All segments of a run in one go. */
static void attend_run(const attend_job *j, work_t *w, const run_t *run, int kv_head) {
  int dim = j->a->dim, rows = run->num_tokens * (j->a->num_heads / j->a->num_kv_heads);
  for (int s = 0; s < run->segments; s++) {
    run_segment(j, w, run, kv_head, s);
    for (int r = 0; r < rows; r++) {
      if (w->count[r] <= 0) continue;
      if (s) {
        fold(w->folded_top + r, w->folded_sum + r, w->folded + r * dim, w->top[r], w->sum[r], w->values + r * dim, dim);
        continue;
      }
      w->folded_top[r] = w->top[r], w->folded_sum[r] = w->sum[r];
      memcpy(w->folded + r * dim, w->values + r * dim, (size_t)dim * 4);
    }
  }
  for (int r = 0; r < rows; r++)
    finish(w->folded + r * dim, w->folded_sum[r], dim, j->a->out + row_of(j->a, run, kv_head, r) * dim);
}

/* One segment of a run, kept for join_row. */
static void attend_segment(const attend_job *j, work_t *w, const run_t *run, int kv_head, int segment) {
  int dim = j->a->dim;
  run_segment(j, w, run, kv_head, segment);
  for (int r = 0; r < w->num_rows; r++) {
    if (w->count[r] <= 0) continue;
    float *to = j->partial + (row_of(j->a, run, kv_head, r) * j->max_segments + segment) * (dim + 2);
    to[0] = w->top[r], to[1] = w->sum[r];
    memcpy(to + 2, w->values + r * dim, (size_t)dim * 4);
  }
}

static void join_row(const attend_job *j, int64_t row) {
  const attend_args *a = j->a;
  int dim = a->dim, segments = a->positions[row / a->num_heads] / SEGMENT + 1;
  float *p = j->partial + row * j->max_segments * (dim + 2);
  for (int s = 1; s < segments; s++) {
    float *q = p + (int64_t)s * (dim + 2);
    fold(p, p + 1, p + 2, q[0], q[1], q + 2, dim);
  }
  finish(p + 2, p[1], dim, a->out + row * dim);
}

static const run_t *run_of_item(const attend_job *j, int item) {
  int low = 0, high = j->num_runs - 1;
  while (low < high) {
    int mid = (low + high + 1) / 2;
    if (j->runs[mid].item0 <= item) low = mid;
    else high = mid - 1;
  }
  return j->runs + low;
}

static void attend_chunk(void *job, int item) {
  const attend_job *j = job;
  uint64_t decoded = j->a->coded ? (uint64_t)SEGMENT * j->a->dim * sizeof(float) : 0;
  work_t *w = pool_scratch(sizeof(work_t) + decoded);
  const run_t *run = run_of_item(j, item);
  int i = item - run->item0, kv_heads = j->a->num_kv_heads;
  if (j->split) attend_segment(j, w, run, i % kv_heads, i / kv_heads);
  else attend_run(j, w, run, i);
}

/* Neighbouring tokens of one slot, at most MAX_RUN of them and MAX_ROWS rows. */
static int find_runs(attend_job *j) {
  const attend_args *a = j->a;
  int heads = a->num_heads / a->num_kv_heads, limit = MAX_ROWS / heads < MAX_RUN ? MAX_ROWS / heads : MAX_RUN;
  for (int t = 0; t < a->num_tokens; t++) {
    run_t *last = j->runs + j->num_runs - 1;
    int segments = a->positions[t] / SEGMENT + 1;
    if (t && last->num_tokens < limit && a->token_slot[last->first] == a->token_slot[t]) last->num_tokens++;
    else *++last = (run_t){t, 1, 0, 0}, j->num_runs++;
    if (segments > last->segments) last->segments = segments;
    if (segments > j->max_segments) j->max_segments = segments;
  }
  return j->num_runs;
}

static int number_items(attend_job *j) {
  int item = 0;
  for (int i = 0; i < j->num_runs; i++) {
    j->runs[i].item0 = item;
    item += j->a->num_kv_heads * (j->split ? j->runs[i].segments : 1);
  }
  return item;
}

/* Memory of the one caller, kept between calls. */
static void *grow(void **memory, uint64_t *have, uint64_t need) {
  if (need > *have) {
    free(*memory);
    if (posix_memalign(memory, 64, need)) abort();
    *have = need;
  }
  return *memory;
}

void ss_attend(const attend_args *a) {
  static void *runs, *partial;
  static uint64_t runs_bytes, partial_bytes;
  attend_job j = {.a = a, .runs = grow(&runs, &runs_bytes, (uint64_t)a->num_tokens * sizeof(run_t) + 64)};
  int num_runs = find_runs(&j), rows = a->num_tokens * a->num_heads;
  j.split = j.max_segments > 1 && num_runs * a->num_kv_heads < 4 * pool_threads();
  if (j.split)
    j.partial = grow(&partial, &partial_bytes, (uint64_t)rows * j.max_segments * (a->dim + 2) * sizeof(float));
  pool_run(attend_chunk, &j, number_items(&j));
  for (int r = 0; j.split && r < rows; r++) join_row(&j, r);
}
