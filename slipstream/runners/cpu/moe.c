/* Routing and the experts' products.
 *
 * A token's experts, their order and its sum over them depend on its own scores alone; products have the same bits in any
 * company (linear.c). So has the result. Tokens are sorted by expert, and all experts' products are one job.
 */
#include "moe.h"

#include <assert.h>
#include <stdlib.h>

#include "elementwise.h"
#include "linear.h"
#include "pool.h"
#include "rowwise.h"

typedef struct {
  int expert[MOE_MAX_ACTIVE]; /* the best first */
  int pair[MOE_MAX_ACTIVE]; /* where its product lies */
  float share[MOE_MAX_ACTIVE];
} route_t;

/* Memory of the one caller, kept between calls. */
typedef struct {
  route_t *routes; /* [tokens] */
  linear_call *up, *down; /* [num_experts] */
  float *x, *inner, *active, *y; /* [pairs, ...] */
} buffers_t;

typedef struct {
  const moe_layer *l;
  const float *x, *scores, *shared, *residual;
  float *out;
  buffers_t b;
  int64_t lds;
  int tokens, hidden, inner;
} moe_job;

static float exp_one(float x) {
  float lanes[VL];
  v_store(lanes, v_exp(v_set(x)));
  return lanes[0];
}

/* The num_active largest scores; of equal ones the lower expert. Their shares are a softmax over them alone. */
static void route(const moe_layer *l, const float *scores, route_t *r) {
  float best[MOE_MAX_ACTIVE], sum = 0.0f;
  int n = 0;
  for (int e = 0; e < l->num_experts; e++) {
    if (n == l->num_active && !(scores[e] > best[n - 1])) continue;
    int at = n < l->num_active ? n++ : n - 1;
    for (; at > 0 && scores[e] > best[at - 1]; at--) best[at] = best[at - 1], r->expert[at] = r->expert[at - 1];
    best[at] = scores[e], r->expert[at] = e;
  }
  for (int i = 0; i < n; i++) sum += r->share[i] = exp_one(best[i] - best[0]);
  for (int i = 0; i < n; i++) r->share[i] /= sum;
}

/* Pairs of one expert lie together: its first, then token by token. Returns the calls, one for each expert in use. */
static int sort_pairs(moe_job *j) {
  const moe_layer *l = j->l;
  int count[l->num_experts], pairs = 0, num_calls = 0;
  memset(count, 0, sizeof count);
  for (int t = 0; t < j->tokens; t++)
    for (int i = 0; i < l->num_active; i++) count[j->b.routes[t].expert[i]]++;
  for (int e = 0; e < l->num_experts; e++) {
    const int m = count[e], inner = j->inner;
    count[e] = pairs;
    if (!m) continue;
    float *x = j->b.x + (int64_t)pairs * j->hidden, *up = j->b.inner + (int64_t)pairs * 2 * inner;
    float *active = j->b.active + (int64_t)pairs * inner, *y = j->b.y + (int64_t)pairs * j->hidden;
    j->b.up[num_calls] = (linear_call){l->gate_up[e], x, up, NULL, NULL, j->hidden, 2 * inner, 0, m};
    j->b.down[num_calls++] = (linear_call){l->down[e], active, y, NULL, NULL, inner, j->hidden, 0, m};
    pairs += m;
  }
  for (int t = 0; t < j->tokens; t++)
    for (int i = 0; i < l->num_active; i++) j->b.routes[t].pair[i] = count[j->b.routes[t].expert[i]]++;
  return num_calls;
}

static void gather_item(void *job, int t) {
  const moe_job *j = job;
  for (int i = 0; i < j->l->num_active; i++)
    memcpy(j->b.x + (int64_t)j->b.routes[t].pair[i] * j->hidden, j->x + (int64_t)t * j->hidden, (size_t)j->hidden * 4);
}

/* n lanes of a token's result: residual, the shared expert, then its experts, the best first. */
INLINE void combine(const moe_job *j, int t, float gate, int d, const int n) {
  const route_t *r = j->b.routes + t;
  const int64_t at = (int64_t)t * j->hidden + d;
#define LOAD(p) (n == VL ? v_load(p) : v_load_part(p, n))
  vf sum = v_fma(v_set(gate), LOAD(j->shared + at), LOAD(j->residual + at));
  for (int i = 0; i < j->l->num_active; i++)
    sum = v_fma(v_set(r->share[i]), LOAD(j->b.y + (int64_t)r->pair[i] * j->hidden + d), sum);
#undef LOAD
  if (n == VL) v_store(j->out + at, sum);
  else v_store_part(j->out + at, sum, n);
}

static void combine_item(void *job, int t) {
  const moe_job *j = job;
  float gate = 1.0f / (1.0f + exp_one(-j->scores[t * j->lds + j->l->num_experts]));
  int d = 0;
  for (; d + VL <= j->hidden; d += VL) combine(j, t, gate, d, VL);
  if (d < j->hidden) combine(j, t, gate, d, j->hidden - d);
}

static void *carve(uint8_t **memory, uint64_t bytes) {
  void *at = *memory;
  *memory += (bytes + 63) / 64 * 64;
  return at;
}

static buffers_t reserve(const moe_job *j) {
  static uint8_t *memory;
  static uint64_t have;
  const uint64_t pairs = (uint64_t)j->tokens * (uint64_t)j->l->num_active, calls = (uint64_t)j->l->num_experts;
  const uint64_t hidden = (uint64_t)j->hidden, inner = (uint64_t)j->inner;
  uint64_t need = pairs * (2 * hidden + 3 * inner) * 4 + 2 * calls * sizeof(linear_call) + 8 * 64;
  need += (uint64_t)j->tokens * sizeof(route_t);
  if (need > have) {
    free(memory);
    if (posix_memalign((void **)&memory, 64, need)) abort();
    have = need;
  }
  uint8_t *at = memory;
  buffers_t b;
  b.routes = carve(&at, (uint64_t)j->tokens * sizeof(route_t));
  b.up = carve(&at, calls * sizeof(linear_call)), b.down = carve(&at, calls * sizeof(linear_call));
  b.x = carve(&at, pairs * hidden * 4), b.y = carve(&at, pairs * hidden * 4);
  b.inner = carve(&at, pairs * 2 * inner * 4), b.active = carve(&at, pairs * inner * 4);
  return b;
}

void ss_moe(const moe_layer *layer, const float *x, const float *scores, int64_t lds, const float *shared,
            const float *residual, int tokens, float *out) {
  moe_job j = {layer, x, scores, shared, residual, out, {0}, lds, tokens, layer->down[0]->rows, layer->down[0]->cols};
  assert(layer->num_active <= MOE_MAX_ACTIVE && layer->num_active <= layer->num_experts);
  j.b = reserve(&j);
  for (int t = 0; t < tokens; t++) route(layer, scores + t * lds, j.b.routes + t);
  const int num_calls = sort_pairs(&j);
  pool_run(gather_item, &j, tokens);
  linear_many(j.b.up, num_calls);
  ss_silu_mul(j.b.inner, tokens * layer->num_active, j.inner, j.b.active);
  linear_many(j.b.down, num_calls);
  pool_run(combine_item, &j, tokens);
}
