/* Packing, copying and reading back rows of packed weights. Runs at load, and for embeddings. */
#include "weight.h"

#include "pool.h"

static float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 1023, bits;
  float f;
  if (exp == 0) {
    f = (float)man * 0x1p-24f;
    return sign ? -f : f;
  }
  bits = sign | (exp == 31 ? 0x7F800000 : (exp + 112) << 23) | man << 13;
  memcpy(&f, &bits, 4);
  return f;
}

static scale_t scale_from_half(const uint8_t *p) {
  uint16_t h;
  memcpy(&h, p, 2);
#ifdef SCALE_F16
  return h;
#else
  return half_to_float(h);
#endif
}

static float scale_value(scale_t s) {
#ifdef SCALE_F16
  return half_to_float(s);
#else
  return s;
#endif
}

static scale_t *scales_of(const weight_t *w, uint8_t *block, int which) {
  return (scale_t *)(block + payload_bytes(w->format)) + which * PANEL;
}

/* raw: GGUF block of 32: f16 d, [f16 m,] 16 bytes, low nibbles columns 0..15, high nibbles 16..31. */
static void pack_w4_block(const weight_t *w, uint8_t *block, int r, const uint8_t *raw) {
  const uint8_t *nibbles = raw + (w->format == W4M ? 4 : 2);
  for (int i = 0; i < 4; i++) {
    uint32_t unit = 0;
    for (int j = 0; j < 8; j++) {
      int k = 8 * i + j;
      uint32_t q = k < 16 ? nibbles[k] & 15 : nibbles[k - 16] >> 4;
      unit |= (q ^ 8) << (4 * j); /* q - 8 in two's complement */
    }
    memcpy(block + (i * PANEL + r) * 4, &unit, 4);
  }
  scales_of(w, block, 0)[r] = scale_from_half(raw);
  if (w->format == W4M) scales_of(w, block, 1)[r] = scale_from_half(raw + 2);
}

static void pack_w8_block(const weight_t *w, uint8_t *block, int r, const uint8_t *raw) {
  for (int k = 0; k < BLOCK; k++) block[w8_offset(k, r)] = raw[2 + k];
  scales_of(w, block, 0)[r] = scale_from_half(raw);
}

/* One column of a plain format: two bytes for BF16, four for F32. */
static void pack_plain_block(const weight_t *w, uint8_t *block, int r, const uint8_t *raw, int cols) {
  int size = w->format == BF16 ? 2 : 4, per_unit = 4 / size;
  for (int k = 0; k < cols; k++)
    memcpy(block + ((k / per_unit) * PANEL + r) * 4 + (k % per_unit) * size, raw + k * size, (size_t)size);
}

typedef struct {
  const weight_t *w;
  const uint8_t *raw;
  int64_t raw_stride;
  int row0, rows;
} pack_job;

static int raw_block_bytes(int format) {
  return format == W4 ? 18 : format == W4M ? 20 : format == W8 ? 34 : format == BF16 ? 64 : 128;
}

static void pack_row(const pack_job *p, int i) {
  const weight_t *w = p->w;
  int row = p->row0 + i, r = row % PANEL;
  for (int b = 0; b < num_blocks(w->cols); b++) {
    const uint8_t *raw = p->raw + i * p->raw_stride + (int64_t)b * raw_block_bytes(w->format);
    uint8_t *block = block_of(w, row, b);
    int cols = w->cols - b * BLOCK;
    if (w->format <= W4M) pack_w4_block(w, block, r, raw);
    else if (w->format == W8) pack_w8_block(w, block, r, raw);
    else pack_plain_block(w, block, r, raw, cols < BLOCK ? cols : BLOCK);
  }
}

#define ROWS_PER_CHUNK 64

static void pack_chunk(void *job, int chunk) {
  pack_job *p = job;
  int end = (chunk + 1) * ROWS_PER_CHUNK;
  for (int i = chunk * ROWS_PER_CHUNK; i < end && i < p->rows; i++) pack_row(p, i);
}

/* Rows row0 .. row0 + rows of w (zeroed before) from GGUF blocks or plain elements, raw_stride bytes a row. */
void ss_pack(const weight_t *w, const uint8_t *raw, int64_t raw_stride, int row0, int rows) {
  pack_job job = {w, raw, raw_stride, row0, rows};
  pool_run(pack_chunk, &job, (rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK);
}

/* Copy all rows of src to dst, from row0 on: same format, same columns. */
void ss_append(const weight_t *dst, int row0, const weight_t *src) {
  int units = num_units(src->format);
  for (int i = 0; i < src->rows; i++) {
    int to = (row0 + i) % PANEL, from = i % PANEL;
    for (int b = 0; b < num_blocks(src->cols); b++) {
      uint8_t *d = block_of(dst, row0 + i, b), *s = block_of(src, i, b);
      for (int u = 0; u < units; u++)
        memcpy(d + (u * PANEL + to) * UNIT_BYTES, s + (u * PANEL + from) * UNIT_BYTES, UNIT_BYTES);
      for (int k = 0; k < num_scales(src->format); k++) scales_of(dst, d, k)[to] = scales_of(src, s, k)[from];
    }
  }
}

static float read_plain(const weight_t *w, const uint8_t *block, int r, int k) {
  uint32_t bits;
  float f;
  int unit = w->format == BF16 ? k / 2 : k;
  memcpy(&bits, block + (unit * PANEL + r) * 4, 4);
  if (w->format == BF16) bits = k % 2 ? bits & 0xFFFF0000u : bits << 16;
  memcpy(&f, &bits, 4);
  return f;
}

static float read_quantised(const weight_t *w, uint8_t *block, int r, int k) {
  float d = scale_value(scales_of(w, block, 0)[r]);
  if (w->format == W8) return d * (float)(int8_t)block[w8_offset(k, r)];
  uint32_t unit;
  memcpy(&unit, block + ((k / 8) * PANEL + r) * 4, 4);
  int q = (int)((unit >> (4 * (k % 8))) & 15) ^ 8;
  return w->format == W4 ? d * (float)(q - 8) : d * (float)q + scale_value(scales_of(w, block, 1)[r]);
}

static void read_row(const weight_t *w, int row, float *out) {
  for (int k = 0; k < w->cols; k++) {
    uint8_t *block = block_of(w, row, k / BLOCK);
    out[k] = w->format <= W8 ? read_quantised(w, block, row % PANEL, k % BLOCK)
                             : read_plain(w, block, row % PANEL, k % BLOCK);
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
  return (int64_t)num_panels(rows) * num_blocks(cols) * block_bytes(format);
}

int ss_panel_rows(void) { return PANEL; }
const char *ss_isa(void) { return SS_ISA; }
