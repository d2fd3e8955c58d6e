/* The next token of each row: greedy, or by the Gumbel maximum with counter-based noise. Ties go to the lowest id.
 * And log-probabilities.
 *
 * A row is divided into parts of PART ids whatever the number of threads; parts are joined from the left.
 */
#include <math.h>
#include <stdlib.h>

#include "pool.h"
#include "simd.h"

#define PART 8192

typedef struct {
  float best, sum; /* sum of exp(logit - best) over the part, when asked for */
  int32_t id;
} part_t;

typedef struct {
  const float *logits; /* [rows, vocab], ld floats apart */
  const float *inv_temperature; /* [rows]; NULL: greedy */
  const uint64_t *seeds; /* [rows] */
  const int64_t *positions; /* [rows] */
  part_t *parts; /* [rows, num_parts] */
  int64_t ld;
  int vocab, num_parts, want_sum;
} sample_job;

static uint64_t splitmix64(uint64_t z) {
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

/* -log(-log(u)), u from a hash of (key, id). */
INLINE vf gumbel(vi id, vi low, vi high) {
  vi x = vi_add(vi_mul(id, vi_set((int32_t)0x9E3779B1)), low);
  x = vi_xor(x, vi_shr(x, 16));
  x = vi_mul(x, vi_set((int32_t)0x85EBCA6B));
  x = vi_xor(vi_xor(x, vi_shr(x, 13)), high);
  x = vi_mul(x, vi_set((int32_t)0xC2B2AE35));
  x = vi_xor(x, vi_shr(x, 16));
  vf u = v_mul(v_add(v_from_int(vi_shr(x, 9)), v_set(0.5f)), v_set(0x1p-23f));
  vf zero = v_set(0.0f);
  return v_sub(zero, v_log(v_sub(zero, v_log(u))));
}

/* Running maximum per lane: a later equal value never replaces an earlier one. */
typedef struct {
  vf best;
  vi id;
} top_t;

INLINE void top_push(top_t *t, vf value, vi id) {
  t->id = vi_pick_gt(value, t->best, id, t->id);
  t->best = v_pick_gt(value, t->best, value, t->best);
}

static void top_reduce(const top_t *t, part_t *out) {
  float best[VL];
  int32_t id[VL];
  v_store(best, t->best);
  memcpy(id, &t->id, sizeof id);
  *out = (part_t){best[0], 0.0f, id[0]};
  for (int i = 1; i < VL; i++)
    if (best[i] > out->best || (best[i] == out->best && id[i] < out->id)) out->best = best[i], out->id = id[i];
}

/* VL logits from id on; ids past the end are minus infinity. */
INLINE vf load_logits(const float *x, int id, int end) {
  if (id + VL <= end) return v_load(x + id);
  float lane[VL];
  for (int i = 0; i < VL; i++) lane[i] = id + i < end ? x[id + i] : -__builtin_inff();
  return v_load(lane);
}

INLINE void scan(const sample_job *j, const int noisy, int row, int from, int to, part_t *out) {
  const float *x = j->logits + row * j->ld;
  uint64_t key = noisy ? splitmix64(j->seeds[row] ^ ((uint64_t)j->positions[row] * 0x9E3779B97F4A7C15u)) : 0;
  vi low = vi_set((int32_t)(uint32_t)key), high = vi_set((int32_t)(key >> 32)), lanes = vi_iota();
  vf inv = v_set(noisy ? j->inv_temperature[row] : 1.0f);
  top_t top = {v_set(-__builtin_inff()), vi_set(from)};
  for (int i = from; i < to; i += VL) {
    vf value = load_logits(x, i, to);
    vi id = vi_add(vi_set(i), lanes);
    if (noisy) value = v_add(v_mul(value, inv), gumbel(id, low, high));
    top_push(&top, value, id);
  }
  top_reduce(&top, out);
}

static float sum_exp(const float *x, int from, int to, float best) {
  vf total = v_set(0.0f), top = v_set(best);
  for (int i = from; i < to; i += VL) total = v_add(total, v_exp(v_sub(load_logits(x, i, to), top)));
  return v_sum(total);
}

static void sample_chunk(void *job, int chunk) {
  const sample_job *j = job;
  int row = chunk / j->num_parts, from = (chunk % j->num_parts) * PART;
  int to = from + PART < j->vocab ? from + PART : j->vocab;
  part_t *part = j->parts + chunk;
  if (j->inv_temperature) scan(j, 1, row, from, to, part);
  else scan(j, 0, row, from, to, part);
  if (j->want_sum && part->best > -__builtin_inff()) /* else every id of the part is forbidden */
    part->sum = sum_exp(j->logits + row * j->ld, from, to, part->best);
}

static float exp_scalar(float x) {
  float lanes[VL];
  v_store(lanes, v_exp(v_set(x)));
  return lanes[0];
}

static void join_parts(const part_t *parts, int n, int64_t *id, float *conf) {
  const part_t *best = parts;
  float sum = 0.0f;
  for (int i = 1; i < n; i++)
    if (parts[i].best > best->best) best = parts + i;
  *id = best->id;
  if (!conf) return;
  for (int i = 0; i < n; i++) sum += parts[i].sum * exp_scalar(parts[i].best - best->best);
  *conf = 1.0f / sum;
}

/* Ids of the largest logit (or of logit * inv_temperature + noise); conf, if not NULL: its softmax probability,
 * greedy only. */
void ss_sample(const float *logits, int64_t ld, int rows, int vocab, const float *inv_temperature,
               const uint64_t *seeds, const int64_t *positions, int64_t *ids, float *conf) {
  int n = (vocab + PART - 1) / PART;
  part_t *parts = malloc((size_t)(rows * n + 1) * sizeof(part_t));
  if (!parts) abort();
  sample_job j = {logits, inv_temperature, seeds, positions, parts, ld, vocab, n, conf != NULL};
  pool_run(sample_chunk, &j, rows * n);
  for (int r = 0; r < rows; r++) join_parts(parts + r * n, n, ids + r, conf ? conf + r : NULL);
  free(parts);
}

/* ---- log-probabilities ---- */

typedef struct {
  const float *logits; /* [rows, vocab], ld floats apart */
  float *out; /* [rows, vocab] */
  part_t *parts; /* [rows, num_parts] */
  float *shift; /* [rows]: log of the sum of exp(logit) */
  int64_t ld;
  int vocab, num_parts;
} log_softmax_job;

static void sum_part(void *job, int chunk) {
  const log_softmax_job *j = job;
  const float *x = j->logits + chunk / j->num_parts * j->ld;
  int from = (chunk % j->num_parts) * PART, to = from + PART < j->vocab ? from + PART : j->vocab;
  vf top = v_set(-__builtin_inff());
  for (int i = from; i < to; i += VL) top = v_max(top, load_logits(x, i, to));
  part_t *part = j->parts + chunk;
  part->best = v_hmax(top);
  part->sum = part->best > -__builtin_inff() ? sum_exp(x, from, to, part->best) : 0.0f;
}

static void shift_part(void *job, int chunk) {
  const log_softmax_job *j = job;
  const int row = chunk / j->num_parts, from = (chunk % j->num_parts) * PART;
  const int to = from + PART < j->vocab ? from + PART : j->vocab;
  const float *x = j->logits + row * j->ld, shift = j->shift[row];
  float *out = j->out + (int64_t)row * j->vocab;
  for (int i = from; i < to; i++) out[i] = x[i] - shift;
}

static float log_sum(const part_t *parts, int n) {
  float best = parts->best;
  double sum = 0.0;
  for (int i = 1; i < n; i++) best = parts[i].best > best ? parts[i].best : best;
  for (int i = 0; i < n; i++) sum += (double)parts[i].sum * exp((double)parts[i].best - (double)best);
  return (float)((double)best + log(sum));
}

void ss_log_softmax(const float *logits, int64_t ld, int rows, int vocab, float *out) {
  int n = (vocab + PART - 1) / PART;
  part_t *parts = malloc((size_t)(rows * n + 1) * sizeof(part_t));
  float *shift = malloc((size_t)(rows + 1) * sizeof(float));
  if (!parts || !shift) abort();
  log_softmax_job j = {logits, out, parts, shift, ld, vocab, n};
  pool_run(sum_part, &j, rows * n);
  for (int r = 0; r < rows; r++) shift[r] = log_sum(parts + r * n, n);
  pool_run(shift_part, &j, rows * n);
  free(parts);
  free(shift);
}
