/* Norms, the gated activation, rotary positions and the write into the paged KV cache. Row by row, so rows never
 * meet: nothing here can depend on the rest of the batch. */
#include "elementwise.h"

#include "kv_codes.h"
#include "pool.h"
#include "rowwise.h"

#define CHUNK_FLOATS 16384 /* less work than this is not worth sharing */

static int rows_per_chunk(int64_t cols) {
  int rows = (int)(CHUNK_FLOATS / (cols ? cols : 1));
  return rows < 1 ? 1 : rows;
}

static int num_chunks(int rows, int per_chunk) { return (rows + per_chunk - 1) / per_chunk; }

typedef struct {
  const float *x, *w;
  float *out;
  float eps;
  int rows, cols, per_chunk;
} norm_job;

static void norm_chunk(void *job, int chunk) {
  norm_job *j = job;
  for (int i = chunk * j->per_chunk; i < (chunk + 1) * j->per_chunk && i < j->rows; i++)
    norm_row(j->x + (int64_t)i * j->cols, j->w, j->eps, j->cols, j->out + (int64_t)i * j->cols);
}

void ss_rms_norm(const float *x, const float *w, float eps, int rows, int cols, float *out) {
  norm_job j = {x, w, out, eps, rows, cols, rows_per_chunk(cols)};
  pool_run(norm_chunk, &j, num_chunks(rows, j.per_chunk));
}

typedef struct {
  const float *x; /* [rows, 2 cols] */
  float *out; /* [rows, cols] */
  int rows, cols, per_chunk;
} silu_job;

static void silu_chunk(void *job, int chunk) {
  silu_job *j = job;
  for (int i = chunk * j->per_chunk; i < (chunk + 1) * j->per_chunk && i < j->rows; i++) {
    const float *gate = j->x + (int64_t)i * 2 * j->cols;
    silu_row(gate, gate + j->cols, j->cols, j->out + (int64_t)i * j->cols);
  }
}

void ss_silu_mul(const float *x, int rows, int cols, float *out) {
  silu_job j = {x, out, rows, cols, rows_per_chunk(4 * (int64_t)cols)};
  pool_run(silu_chunk, &j, num_chunks(rows, j.per_chunk));
}

typedef struct {
  const float *gate; /* [rows, cols], ldg floats from row to row */
  float *x; /* [rows, cols] */
  int64_t ldg;
  int rows, cols, per_chunk;
} gate_job;

static void gate_chunk(void *job, int chunk) {
  gate_job *j = job;
  for (int i = chunk * j->per_chunk; i < (chunk + 1) * j->per_chunk && i < j->rows; i++)
    sigmoid_row(j->gate + i * j->ldg, j->cols, j->x + (int64_t)i * j->cols);
}

void ss_sigmoid_mul(const float *gate, int64_t ldg, int rows, int cols, float *x) {
  gate_job j = {gate, x, ldg, rows, cols, rows_per_chunk(4 * (int64_t)cols)};
  pool_run(gate_chunk, &j, num_chunks(rows, j.per_chunk));
}

/* Half-split pairing: element i rotates with element i + rot / 2; elements from rot on are copied. */
static void rotate(const float *x, const float *cos, const float *sin, int rot, int dim, float *out) {
  int half = rot / 2, i = 0;
  for (; i + VL <= half; i += VL) {
    vf a = v_load(x + i), b = v_load(x + half + i), c = v_load(cos + i), s = v_load(sin + i);
    v_store(out + i, v_sub(v_mul(a, c), v_mul(b, s)));
    v_store(out + half + i, v_add(v_mul(b, c), v_mul(a, s)));
  }
  for (; i < half; i++) {
    float a = x[i], b = x[half + i];
    out[i] = a * cos[i] - b * sin[i];
    out[half + i] = b * cos[i] + a * sin[i];
  }
  memcpy(out + rot, x + rot, (size_t)(dim - rot) * 4);
}

static void norm_and_rotate(const rope_job *r, const float *x, const float *norm, int pos, float *out) {
  float normed[MAX_HEAD_DIM];
  if (norm) {
    norm_row(x, norm, r->eps, r->dim, normed);
    x = normed;
  }
  rotate(x, r->cos + (int64_t)pos * (r->rot / 2), r->sin + (int64_t)pos * (r->rot / 2), r->rot, r->dim, out);
}

/* ``row``: of the block's heads times positions. */
static void store_coded(const rope_job *r, const float *k, const float *v, int angle, int64_t block, int64_t row) {
  float rotated[MAX_HEAD_DIM];
  int rows = r->num_kv_heads * r->block_size, dim = r->dim;
  int64_t start = block * coded_block_bytes(rows, dim);
  uint8_t *keys = (uint8_t *)r->k_cache + start, *values = (uint8_t *)r->v_cache + start;
  norm_and_rotate(r, k, r->k_norm, angle, rotated);
  encode_row(rotated, dim, keys + row * dim, keys + scale_offset(rows, dim, row));
  encode_row(v, dim, values + row * dim, values + scale_offset(rows, dim, row));
}

static void rope_token(const rope_job *r, int t) {
  int pos = r->positions[t], angle = r->rope_positions[t], dim = r->dim;
  int64_t block = r->block_table[(int64_t)r->token_slot[t] * r->max_blocks + pos / r->block_size];
  const float *q = r->qkv + t * r->ldx, *k = q + r->num_heads * dim, *v = k + r->num_kv_heads * dim;
  for (int h = 0; h < r->num_heads; h++)
    norm_and_rotate(r, q + h * dim, r->q_norm, angle, r->q_out + ((int64_t)t * r->num_heads + h) * dim);
  for (int h = 0; h < r->num_kv_heads; h++) {
    int64_t row = h * r->block_size + pos % r->block_size;
    if (r->coded) {
      store_coded(r, k + h * dim, v + h * dim, angle, block, row);
      continue;
    }
    int64_t at = (block * r->num_kv_heads * r->block_size + row) * dim;
    norm_and_rotate(r, k + h * dim, r->k_norm, angle, (float *)r->k_cache + at);
    memcpy((float *)r->v_cache + at, v + h * dim, (size_t)dim * 4);
  }
}

static void rope_chunk(void *job, int chunk) {
  rope_job *r = job;
  for (int t = chunk * r->per_chunk; t < (chunk + 1) * r->per_chunk && t < r->num_tokens; t++) rope_token(r, t);
}

void ss_rope_store(rope_job *r) {
  r->per_chunk = rows_per_chunk((int64_t)(r->num_heads + 2 * r->num_kv_heads) * r->dim);
  pool_run(rope_chunk, r, num_chunks(r->num_tokens, r->per_chunk));
}
