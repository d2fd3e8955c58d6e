/* Reading back rows of packed weights, for embeddings; sizes. */
#include "weight.h"

#include "pool.h"

/* Lane r of the vectors that the tiles load: what a product sees is what an embedding is. */
static float lane(vf v, int r) {
  float lanes[VL];
  v_store(lanes, v);
  return lanes[r];
}

static uint32_t unit_at(const uint8_t *units, int i, int r) {
  uint32_t unit;
  memcpy(&unit, units + (i * PANEL + r) * UNIT_BYTES, 4);
  return unit;
}

/* The code of column k. */
static int read_code(int kind, const uint8_t *units, int r, int k) {
  const int byte = k % 8 / 2, word = k / 8 * 2 + k % 2, shift = 8 * byte;
  if (kind == CODES8) return (int)(unit_at(units, word, r) >> shift & 255);
  if (kind == CODES6) {
    const int first = word / 4 * 3;
    if (word % 4 < 3) return (int)(unit_at(units, first + word % 4, r) >> shift & 63);
    int u = 0;
    for (int i = 0; i < 3; i++) u |= (int)(unit_at(units, first + i, r) >> (shift + 6) & 3) << 2 * i;
    return u;
  }
  const int u = (int)(unit_at(units, nibble_unit(kind, k / 8), r) >> 4 * (k % 8) & 15);
  return kind == CODES5 ? u | (int)(unit_at(units, 0, r) >> (shift + word) & 1) << 4 : u;
}

static void read_group(const weight_t *w, const uint8_t *header, const uint8_t *factors, int row, int half, float *out) {
  const int format = w->format, kind = kind_of(format), columns = BLOCK / num_halves(format);
  const int r = row % PANEL, first = r - r % VL;
  const uint8_t *units = factors + all_factors_bytes(format);
  const float scale = lane(load_scale(format, header, factors, half, first), r % VL);
  const float low = format & HAS_MINIMUM ? lane(load_minimum(format, header, factors, half, first), r % VL) : 0.0f;
  for (int k = half * columns; k < (half + 1) * columns; k++) {
    const int u = kind == TABLE4 ? w->table[read_code(kind, units, r, k)] : read_code(kind, units, r, k);
    out[k] = (float)(u - offset_of(format)) * scale;
    if (format & HAS_MINIMUM) out[k] += low;
  }
}

static float read_plain(int kind, const uint8_t *units, int r, int k) {
  uint32_t bits;
  float f;
  memcpy(&bits, units + ((kind == BF16 ? k / 2 : k) * PANEL + r) * UNIT_BYTES, 4);
  if (kind == BF16) bits = k % 2 ? bits & 0xFFFF0000u : bits << 16;
  memcpy(&f, &bits, 4);
  return f;
}

static void read_block(const weight_t *w, int row, int b, float *out) {
  const int format = w->format, spans = span_blocks(format);
  const uint8_t *header = span_of(w, row, b / spans);
  const uint8_t *block = header + header_bytes(format) + (b % spans) * block_bytes(format);
  if (has_scales(format))
    for (int half = 0; half < num_halves(format); half++) read_group(w, header, block, row, half, out);
  else
    for (int k = 0; k < BLOCK; k++) out[k] = read_plain(kind_of(format), block, row % PANEL, k);
}

static void read_row(const weight_t *w, int row, float *out) {
  for (int b = 0; b < num_blocks(w->cols); b++) {
    float block[BLOCK];
    const int first = b * BLOCK, columns = w->cols - first < BLOCK ? w->cols - first : BLOCK;
    read_block(w, row, b, block);
    if (!w->order) memcpy(out + first, block, (size_t)columns * 4);
    else
      for (int k = 0; k < columns; k++) out[w->order[first + k]] = block[k];
  }
}

typedef struct {
  const weight_t *w;
  const int64_t *ids;
  float *out; /* [num_ids, cols] */
} embed_job;

static void embed_chunk(void *job, int i) {
  embed_job *e = job;
  read_row(e->w, (int)e->ids[i], e->out + (int64_t)i * e->w->cols);
}

void ss_embed(const weight_t *w, const int64_t *ids, int num_ids, float *out) {
  embed_job job = {w, ids, out};
  pool_run(embed_chunk, &job, num_ids);
}

int64_t ss_packed_bytes(int format, int rows, int cols) {
  return (int64_t)num_panels(rows) * num_spans(format, cols) * span_bytes(format);
}

int ss_panel_rows(void) { return PANEL; }
const char *ss_isa(void) { return SS_ISA; }
