/* Packing: from codes and scales, from blocks as GGUF files hold them, from plain elements. Runs at load. */
#include "gguf_block.h"
#include "pool.h"

static uint16_t float_to_half(float f) { /* of numbers that are exact in half precision */
  uint32_t bits;
  memcpy(&bits, &f, 4);
  const uint32_t sign = bits >> 16 & 0x8000, exp = bits >> 23 & 255, man = bits & 0x7FFFFF;
  if (exp == 255) return (uint16_t)(sign | 0x7C00 | man >> 13);
  if (exp < 113) return (uint16_t)(sign | (exp < 103 ? 0 : (man | 0x800000) >> (126 - exp)));
  return (uint16_t)(sign | (exp - 112) << 10 | man >> 13);
}

static void store_step(int format, uint8_t *header, int at, float step) {
  if (format & WIDE_STEPS) {
    ((float *)header)[at] = step;
    return;
  }
#ifdef SCALE_F16
  ((scale_t *)header)[at] = float_to_half(step);
#else
  ((scale_t *)header)[at] = step;
  (void)float_to_half;
#endif
}

/* Every second byte of 8, the first, the third and so on. */
INLINE uint32_t even_bytes(uint64_t x) {
  x &= 0x00FF00FF00FF00FFull;
  x = (x | x >> 8) & 0x0000FFFF0000FFFFull;
  return (uint32_t)(x | x >> 16);
}

INLINE void store_unit(uint8_t *units, int i, int r, uint32_t unit) { memcpy(units + (i * PANEL + r) * UNIT_BYTES, &unit, 4); }

/* 32 columns of row r of a panel. */
INLINE void store_units(const int kind, uint8_t *units, int r, const uint8_t *u) {
  uint32_t fifth = 0, words[8];
  for (int i = 0; i < 4; i++) {
    uint64_t eight;
    memcpy(&eight, u + 8 * i, 8);
    const uint32_t even = even_bytes(eight), odd = even_bytes(eight >> 8);
    words[2 * i] = even, words[2 * i + 1] = odd;
    if (kind == CODES6) continue;
    if (kind == CODES8) {
      store_unit(units, 2 * i, r, even);
      store_unit(units, 2 * i + 1, r, odd);
      continue;
    }
    store_unit(units, nibble_unit(kind, i), r, (even & 0x0F0F0F0F) | (odd & 0x0F0F0F0F) << 4);
    if (kind == CODES5) fifth |= (even >> 4 & 0x01010101) << 2 * i | (odd >> 4 & 0x01010101) << (2 * i + 1);
  }
  if (kind == CODES5) store_unit(units, 0, r, fifth);
  if (kind == CODES6)
    for (int i = 0; i < 6; i++)
      store_unit(units, i, r, words[i / 3 * 4 + i % 3] | (words[i / 3 * 4 + 3] >> 2 * (i % 3) & 0x03030303) << 6);
}

INLINE void store_span_of(const int kind, const weight_t *w, int row, int span, const codes_t *c) {
  const int format = w->format, halves = num_halves(format), r = row % PANEL;
  uint8_t *header = span_of(w, row, span), *block = header + header_bytes(format);
  for (int i = 0; i < (format & HALF_STEPS ? 2 : 1); i++) {
    store_step(format, header, i * PANEL + r, c->step[i]);
    if (format & HAS_MINIMUM) store_step(format, header + steps_bytes(format), i * PANEL + r, c->minimum_step[i]);
  }
  for (int b = 0; b < span_blocks(format); b++, block += block_bytes(format)) {
    uint8_t *factors = block;
    store_units(kind, block + all_factors_bytes(format), r, c->u + b * BLOCK);
    for (int half = 0; half < halves; half++) {
      if (format & HAS_FACTOR) factors[half * PANEL + r] = (uint8_t)c->factor[b * halves + half];
      if (format & HAS_MINIMUM_FACTOR)
        factors[factors_bytes(format) + half * PANEL + r] = c->minimum_factor[b * halves + half];
    }
  }
}

static void store_span(const weight_t *w, int row, int span, const codes_t *c) {
  switch (kind_of(w->format)) {
    case CODES5: store_span_of(CODES5, w, row, span, c); break;
    case CODES6: store_span_of(CODES6, w, row, span, c); break;
    case CODES8: store_span_of(CODES8, w, row, span, c); break;
    default: store_span_of(CODES4, w, row, span, c);
  }
}

/* ---- codes and scales ---- */

/* Rows as load/quantized/codes.py has them; the same struct is in packed.py. A factor or minimum may be NULL. */
typedef struct {
  const uint8_t *codes; /* [rows, cols] */
  const float *step, *minimum_step; /* [rows, cols / span] */
  const int8_t *factor; /* [rows, cols / group] */
  const uint8_t *minimum_factor; /* [rows, cols / group] */
  int32_t group, span;
  int32_t bias; /* added to a code to make it unsigned */
} codes_rows;

static void read_codes(const weight_t *w, const codes_rows *from, int64_t row, int span, codes_t *c) {
  const int format = w->format, columns = span_blocks(format) * BLOCK, first = span * columns;
  const int per_group = format & HALVES ? 16 : 32;
  const int64_t steps = w->cols / from->span, groups = w->cols / from->group;
  const uint8_t *codes = from->codes + row * w->cols + first;
  for (int k = 0; k < columns; k++) c->u[k] = (uint8_t)(codes[k] + from->bias);
  for (int i = 0; i < (format & HALF_STEPS ? 2 : 1); i++) {
    const int64_t at = row * steps + (first + 16 * i) / from->span;
    c->step[i] = from->step[at];
    if (from->minimum_step) c->minimum_step[i] = from->minimum_step[at];
  }
  for (int i = 0; i < columns / per_group; i++) { /* a wider group's are repeated */
    const int64_t at = row * groups + (first + i * per_group) / from->group;
    if (from->factor) c->factor[i] = from->factor[at];
    if (from->minimum_factor) c->minimum_factor[i] = from->minimum_factor[at];
  }
}

/* ---- jobs ---- */

typedef struct {
  const weight_t *w;
  const codes_rows *codes; /* or */
  const uint8_t *raw; /* rows of blocks, or of plain elements */
  int64_t raw_stride;
  int type; /* of a GGUF block, or -1 */
  int row0, rows;
} pack_job;

static void pack_plain_row(const pack_job *p, int i) {
  const weight_t *w = p->w;
  const int row = p->row0 + i, r = row % PANEL, size = kind_of(w->format) == BF16 ? 2 : 4, per_unit = 4 / size;
  const uint8_t *raw = p->raw + i * p->raw_stride;
  for (int k = 0; k < w->cols; k++, raw += size) {
    uint8_t *block = span_of(w, row, k / BLOCK);
    const int at = k % BLOCK;
    memcpy(block + ((at / per_unit) * PANEL + r) * UNIT_BYTES + (at % per_unit) * size, raw, (size_t)size);
  }
}

static void pack_row(const pack_job *p, int i) {
  const weight_t *w = p->w;
  codes_t c;
  if (!has_scales(w->format)) {
    pack_plain_row(p, i);
    return;
  }
  for (int s = 0; s < num_spans(w->format, w->cols); s++) {
    if (p->codes) read_codes(w, p->codes, i, s, &c);
    else read_gguf_block(p->type, p->raw + i * p->raw_stride + (int64_t)s * gguf_block_bytes(p->type), &c);
    store_span(w, p->row0 + i, s, &c);
  }
}

/* The rows of one panel. */
static void pack_chunk(void *job, int chunk) {
  const pack_job *p = job;
  const int first = p->row0 / PANEL * PANEL + chunk * PANEL - p->row0;
  for (int i = first < 0 ? 0 : first; i < first + PANEL && i < p->rows; i++) pack_row(p, i);
}

static void pack(pack_job job) {
  pool_run(pack_chunk, &job, (job.row0 + job.rows - 1) / PANEL - job.row0 / PANEL + 1);
}

/* Rows row0 .. row0 + rows of w, which was zeroed before. */
void ss_pack_codes(const weight_t *w, const codes_rows *codes, int row0, int rows) {
  pack((pack_job){.w = w, .codes = codes, .type = -1, .row0 = row0, .rows = rows});
}

/* The same from GGUF blocks, or from plain elements (type -1), raw_stride bytes a row. */
void ss_pack_raw(const weight_t *w, int type, const uint8_t *raw, int64_t raw_stride, int row0, int rows) {
  pack((pack_job){.w = w, .raw = raw, .raw_stride = raw_stride, .type = type, .row0 = row0, .rows = rows});
}
