/* Gated DeltaNet: causal conv, gated delta rule, gated norm, with the drafts' inputs on a tape.
 *
 * Tokens are stepped one by one, always: fed, replayed, drafted or read as a prompt. Per value column
 *
 *     r = sum over i of k[i] S[i], i rising     delta = beta (v - g r)     S[i] = k[i] delta + g S[i]
 *     o = sum over i of q[i] S[i], i rising
 *
 * so a token has the same bits whatever rows share its batch and however its prompt was divided into steps. Stepping
 * costs little compared with the products: a slice of SLICE columns of the state stays in the nearest cache while a
 * block of tokens passes over it, and one pass updates the state, reads it for this token and recalls it for the next.
 *
 * A work item is one value head of one row. Windows and tapes are written when all items are done: heads share keys.
 */
#include "gdn.h"

#include <assert.h>

#include "pool.h"
#include "rowwise.h"

#if VL == 16
#define VECTORS 2
#else
#define VECTORS 4 /* enough sums under way to hide their latency */
#endif
#define SLICE (VECTORS * VL)
#define BLOCK_TOKENS 64 /* committed tokens whose conv outputs are made at once */
#define MAX_TOKENS (BLOCK_TOKENS + GDN_MAX_DRAFTS)

typedef struct {
  float q[MAX_TOKENS][GDN_MAX_DIM], k[MAX_TOKENS][GDN_MAX_DIM]; /* after conv, silu and norm */
  float v[MAX_TOKENS][GDN_MAX_DIM], o[MAX_TOKENS][GDN_MAX_DIM];
  float decay[MAX_TOKENS], beta[MAX_TOKENS]; /* decay as a factor */
  float state[GDN_MAX_DIM * SLICE];
} work_t;

typedef struct {
  const gdn_layer *l;
  const float *x;
  const gdn_row *rows;
  float *out;
  int64_t ldx;
  int num_rows, channels;
} gdn_job;

/* ---- inputs ---- */

/* Conv input i of a row, counted from its first replayed or fed token; the window lies before it. */
static const float *input_at(const gdn_job *j, const gdn_row *row, int i) {
  const gdn_layer *l = j->l;
  if (i < 0) return l->window + ((int64_t)row->slot * (l->kernel - 1) + i + l->kernel - 1) * j->channels;
  if (i < row->num_replay) return l->tape_conv + ((int64_t)row->slot * l->depth + i) * j->channels;
  return j->x + (row->offset + i - row->num_replay) * j->ldx;
}

/* silu of the conv at token i, n channels from c on. */
static void conv_token(const gdn_job *j, const gdn_row *row, int i, int c, int n, float *out) {
  const int kernel = j->l->kernel;
  const float *x[GDN_MAX_KERNEL], *w[GDN_MAX_KERNEL];
  for (int tap = 0; tap < kernel; tap++) {
    x[tap] = input_at(j, row, i - kernel + 1 + tap) + c;
    w[tap] = j->l->conv + (int64_t)tap * j->channels + c;
  }
  int d = 0;
  for (; d + VL <= n; d += VL) {
    vf sum = v_mul(v_load(x[0] + d), v_load(w[0] + d));
    for (int tap = 1; tap < kernel; tap++) sum = v_fma(v_load(x[tap] + d), v_load(w[tap] + d), sum);
    v_store(out + d, v_silu(sum));
  }
  if (d == n) return;
  vf sum = v_mul(v_load_part(x[0] + d, n - d), v_load_part(w[0] + d, n - d));
  for (int tap = 1; tap < kernel; tap++)
    sum = v_fma(v_load_part(x[tap] + d, n - d), v_load_part(w[tap] + d, n - d), sum);
  v_store_part(out + d, v_silu(sum), n - d);
}

static void scale_row(float *x, int n, float scale) {
  for (int i = 0; i < n; i++) x[i] *= scale;
}

static float unit_scale(const float *x, int n) { return 1.0f / sqrtf(sum_squares(x, n) + 1e-6f); }

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* Log decay and beta of a fed token, from b and a at the end of its inputs. */
static void find_gates(const gdn_job *j, const float *x, int head, float *decay, float *beta) {
  const gdn_layer *l = j->l;
  const float *b = x + j->channels + l->num_v_heads * l->v_dim, *a = b + l->num_v_heads;
  *decay = l->decay_scale[head] * softplus(a[head] + l->dt_bias[head]);
  *beta = 1.0f / (1.0f + expf(-b[head]));
}

static void gates_at(const gdn_job *j, const gdn_row *row, int head, int i, float *decay, float *beta) {
  const gdn_layer *l = j->l;
  if (i >= row->num_replay) {
    find_gates(j, input_at(j, row, i), head, decay, beta);
  } else {
    const float *taped = l->tape_gates + ((int64_t)row->slot * l->depth + i) * 2 * l->num_v_heads + head;
    *decay = taped[0], *beta = taped[l->num_v_heads];
  }
}

/* Tokens from .. from + n - 1 of a row, ready for the recurrence of one head. */
static void prepare(const gdn_job *j, const gdn_row *row, int head, int from, int n, work_t *w) {
  const gdn_layer *l = j->l;
  const int key = l->tiled ? head % l->num_k_heads : head / (l->num_v_heads / l->num_k_heads);
  const int keys = l->num_k_heads * l->k_dim;
  const float q_scale = 1.0f / sqrtf((float)l->k_dim);
  for (int t = 0; t < n; t++) {
    conv_token(j, row, from + t, key * l->k_dim, l->k_dim, w->q[t]);
    conv_token(j, row, from + t, keys + key * l->k_dim, l->k_dim, w->k[t]);
    conv_token(j, row, from + t, 2 * keys + head * l->v_dim, l->v_dim, w->v[t]);
    for (int d = l->v_dim; d % SLICE; d++) w->v[t][d] = 0.0f;
    scale_row(w->q[t], l->k_dim, unit_scale(w->q[t], l->k_dim) * q_scale);
    scale_row(w->k[t], l->k_dim, unit_scale(w->k[t], l->k_dim));
    gates_at(j, row, head, from + t, w->decay + t, w->beta + t);
    w->decay[t] = expf(w->decay[t]);
  }
}

/* ---- recurrence ---- */

/* n columns of the state, whose rows lie v_dim floats apart, to a slice; columns that do not exist are zero. */
static void load_slice(const float *state, int k_dim, int v_dim, int n, float *slice) {
  if (n < SLICE) memset(slice, 0, (size_t)k_dim * SLICE * 4);
  for (int i = 0; i < k_dim; i++, state += v_dim, slice += SLICE) {
    __builtin_prefetch(state + SLICE, 0, 3); /* the next slice */
    if (n == SLICE)
      for (int c = 0; c < SLICE; c += VL) v_store(slice + c, v_load(state + c));
    else memcpy(slice, state, (size_t)n * 4);
  }
}

static void store_slice(const float *slice, int k_dim, int v_dim, int n, float *state) {
  for (int i = 0; i < k_dim; i++, state += v_dim, slice += SLICE) {
    if (n == SLICE)
      for (int c = 0; c < SLICE; c += VL) v_store(state + c, v_load(slice + c));
    else memcpy(state, slice, (size_t)n * 4);
  }
}

INLINE void recall(const float *slice, const float *k, int k_dim, vf r[VECTORS]) {
  for (int c = 0; c < VECTORS; c++) r[c] = v_set(0.0f);
  for (int i = 0; i < k_dim; i++)
    for (int c = 0; c < VECTORS; c++) r[c] = v_fma(v_set(k[i]), v_load(slice + i * SLICE + c * VL), r[c]);
}

/* Token t: the state moves on, o reads it and, if there is one more, r recalls it for the next token's key. */
INLINE void step(const int more, work_t *w, int t, int k_dim, const vf delta[VECTORS], vf o[VECTORS], vf r[VECTORS]) {
  const vf g = v_set(w->decay[t]);
  for (int c = 0; c < VECTORS; c++) o[c] = r[c] = v_set(0.0f);
  for (int i = 0; i < k_dim; i++) {
    const vf key = v_set(w->k[t][i]), query = v_set(w->q[t][i]);
    float *row = w->state + i * SLICE;
    _Pragma("GCC unroll 4") for (int c = 0; c < VECTORS; c++) {
      vf s = v_fma(key, delta[c], v_mul(g, v_load(row + c * VL)));
      v_store(row + c * VL, s);
      o[c] = v_fma(query, s, o[c]);
      if (more) r[c] = v_fma(v_set(w->k[t + more][i]), s, r[c]);
    }
  }
}

static float *state_of(const gdn_layer *l, int slot, int head) {
  return l->state + ((int64_t)slot * l->num_v_heads + head) * l->k_dim * l->v_dim;
}

/* A block of a row's tokens, from the from-th on: its state is stored after the first `committed` of them. */
typedef struct {
  const gdn_row *row;
  int head, from, tokens, committed;
} block_t;

/* The state after the first t tokens of a block, where it is to be kept. */
static void keep_slice(const gdn_layer *l, const work_t *w, const block_t *b, int d, int n, int t) {
  for (int i = 0; i < b->row->num_keeps; i++)
    if (b->row->keep_at[i] == b->from + t)
      store_slice(w->state, l->k_dim, l->v_dim, n, state_of(l, b->row->keep_slot[i], b->head) + d);
}

/* All tokens of a block over columns d .. of the state. */
static void run_slice(const gdn_layer *l, work_t *w, float *state, int d, const block_t *b) {
  const int tokens = b->tokens, committed = b->committed;
  const int n = l->v_dim - d < SLICE ? l->v_dim - d : SLICE;
  vf o[VECTORS], r[VECTORS], delta[VECTORS];
  load_slice(state + d, l->k_dim, l->v_dim, n, w->state);
  recall(w->state, w->k[0], l->k_dim, r);
  for (int t = 0; t < tokens; t++) {
    const vf g = v_set(w->decay[t]), beta = v_set(w->beta[t]);
    for (int c = 0; c < VECTORS; c++)
      delta[c] = v_mul(beta, v_sub(v_load(w->v[t] + d + c * VL), v_mul(g, r[c])));
    if (t + 1 < tokens) step(1, w, t, l->k_dim, delta, o, r);
    else step(0, w, t, l->k_dim, delta, o, r);
    for (int c = 0; c < VECTORS; c++) v_store(w->o[t] + d + c * VL, o[c]);
    if (t < committed && b->row->num_keeps) keep_slice(l, w, b, d, n, t + 1);
    if (t + 1 == committed) store_slice(w->state, l->k_dim, l->v_dim, n, state + d);
  }
}

/* The norm and the gate of the tokens that are fed, not replayed. */
static void finish(const gdn_job *j, const gdn_row *row, int head, int from, int n, const work_t *w) {
  const gdn_layer *l = j->l;
  for (int t = from < row->num_replay ? row->num_replay - from : 0; t < n; t++) {
    const float *z = input_at(j, row, from + t) + j->channels + head * l->v_dim;
    int64_t token = row->offset + from + t - row->num_replay;
    float *out = j->out + (token * l->num_v_heads + head) * l->v_dim;
    norm_row(w->o[t], l->norm, l->eps, l->v_dim, out);
    silu_row(z, out, l->v_dim, out);
  }
}

static void head_item(void *job, int item) {
  const gdn_job *j = job;
  const gdn_layer *l = j->l;
  const int head = item % l->num_v_heads;
  const gdn_row *row = j->rows + item / l->num_v_heads;
  float *state = state_of(l, row->slot, head);
  work_t *w = pool_scratch(sizeof(work_t));
  int committed = row->num_replay + row->num_committed;
  for (int from = 0, n; from < committed + row->num_drafts; from += n) {
    int last = committed - from <= BLOCK_TOKENS, kept = last ? committed - from : BLOCK_TOKENS;
    n = last ? kept + row->num_drafts : kept;
    prepare(j, row, head, from, n, w);
    const block_t block = {row, head, from, n, kept};
    for (int d = 0; d < l->v_dim; d += SLICE) run_slice(l, w, state, d, &block);
    finish(j, row, head, from, n, w);
  }
}

/* ---- commit ---- */

/* The window after the first n tokens of a row, oldest first: it may move down inside itself. */
static void store_window(const gdn_job *j, const gdn_row *row, int n, int slot) {
  const int taps = j->l->kernel - 1;
  for (int tap = 0; tap < taps; tap++) {
    float *to = j->l->window + ((int64_t)slot * taps + tap) * j->channels;
    memmove(to, input_at(j, row, n - taps + tap), (size_t)j->channels * 4);
  }
}

/* Windows that are kept, while the row's own is still the old one; that of the last committed token; the drafts' tape. */
static void row_item(void *job, int item) {
  const gdn_job *j = job;
  const gdn_layer *l = j->l;
  const gdn_row *row = j->rows + item;
  const int committed = row->num_replay + row->num_committed;
  for (int i = 0; i < row->num_keeps; i++) store_window(j, row, row->keep_at[i], row->keep_slot[i]);
  store_window(j, row, committed, row->slot);
  for (int d = 0; d < row->num_drafts; d++) {
    const float *x = input_at(j, row, committed + d);
    int64_t at = (int64_t)row->slot * l->depth + d;
    float *gates = l->tape_gates + at * 2 * l->num_v_heads;
    memcpy(l->tape_conv + at * j->channels, x, (size_t)j->channels * 4);
    for (int h = 0; h < l->num_v_heads; h++) find_gates(j, x, h, gates + h, gates + l->num_v_heads + h);
  }
}

void ss_gdn(const gdn_layer *layer, const float *x, int64_t ldx, const gdn_row *rows, int num_rows, float *out) {
  gdn_job j = {layer, x, rows, out, ldx, num_rows, 0};
  j.channels = 2 * layer->num_k_heads * layer->k_dim + layer->num_v_heads * layer->v_dim;
  assert(layer->k_dim <= GDN_MAX_DIM && layer->v_dim <= GDN_MAX_DIM && GDN_MAX_DIM % SLICE == 0);
  assert(layer->kernel <= GDN_MAX_KERNEL);
  pool_run(head_item, &j, num_rows * layer->num_v_heads);
  pool_run(row_item, &j, num_rows);
}
