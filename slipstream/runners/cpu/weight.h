/* How a packed weight lies in memory.
 *
 * Output rows are grouped in panels of PANEL = 3 VL rows, input columns in blocks of 32 and spans of 1 to 8 blocks. A panel is
 * one sequential stream: span after span. A span begins with its steps, PANEL of each kind; then block after block:
 *
 *     factors     PANEL signed bytes for each group of columns, where scales have factors; then those of minima, unsigned
 *     units       unit (i, r) at (i * PANEL + r) * UNIT_BYTES        i = which columns, r = row in the panel
 *
 * Tiles read it in this order: memory is fetched ahead of loads that go forwards only (docs/LOG.md).
 * So a vector load yields some columns of VL rows, and no kernel ever adds across lanes. Rows and columns are padded with
 * zeros. A weight is (u - offset) * step * factor + minimum step * minimum factor, where u is an unsigned code:
 *
 *     CODES4    4 units of 8 nibbles, the first column lowest
 *     TABLE4    the same; u is the table's entry, kept with 128 added
 *     CODES5    a unit of fifth bits: bit s of byte j is that of word s; then as CODES4
 *     CODES6    twice 3 units for four words: three in the low 6 bits, a third of the last in the upper 2 bits of each, its
 *               lowest first; groups of 16, factors, no minima
 *     CODES8    8 units of 4 bytes: the words
 *     BF16      16 units of two bfloat16, the even column low
 *     F32       32 units of one float
 *
 * Word 2 i has the even ones of columns 8 i to 8 i + 7, word 2 i + 1 the odd ones, one in each byte.
 */
#ifndef SS_WEIGHT_H
#define SS_WEIGHT_H

#include "simd.h"

#define NUM_GROUPS 3
#define PANEL (NUM_GROUPS * VL)
#define BLOCK 32
#define MAX_SPAN 256 /* columns that share a step */
#define MIN_GROUP 16 /* columns that share a factor */

/* The codes are the low bits of a format. The same numbers are in packed.py. */
enum { CODES4 = 0, TABLE4 = 1, CODES5 = 2, CODES6 = 3, CODES8 = 4, BF16 = 5, F32 = 6, STACK = 7 };
enum {
  HALVES = 1 << 3, /* groups of 16 columns, else of 32 or more */
  HAS_FACTOR = 1 << 4,
  HAS_MINIMUM = 1 << 5,
  HAS_MINIMUM_FACTOR = 1 << 6,
  WIDE_STEPS = 1 << 7, /* steps are float32, else of half precision */
  HALF_STEPS = 1 << 8, /* a step for each 16 columns */
  SPAN_SHIFT = 9, /* two bits: the binary logarithm of the blocks in a span */
  OFFSET_SHIFT = 11, /* eight bits */
};

/* The same struct is declared in packed.py. A STACK is other weights, one below the other: data points to their addresses. */
typedef struct {
  int32_t format;
  int32_t rows;
  int32_t cols;
  int32_t num_parts; /* of a STACK */
  uint8_t *data;
  const int32_t *order; /* [cols]: column i is that of x[order[i]]; NULL: as they are */
  uint8_t table[16]; /* of TABLE4 */
} weight_t;

#define UNIT_BYTES 4
INLINE int kind_of(int format) { return format & 7; }
INLINE int has_scales(int format) { return kind_of(format) <= CODES8; }
INLINE int offset_of(int format) { return format >> OFFSET_SHIFT & 255; }
INLINE int span_blocks(int format) { return 1 << (format >> SPAN_SHIFT & 3); }
INLINE int num_halves(int format) { return format & HALVES ? 2 : 1; }
INLINE int num_units(int codes) {
  return codes <= TABLE4 ? 4 : codes == CODES5 ? 5 : codes == CODES6 ? 6 : codes == CODES8 ? 8 : codes == BF16 ? 16 : 32;
}
/* Where the nibbles of columns 8 i to 8 i + 7 are. Their fifth bits are in the first unit: never behind what is read next. */
INLINE int nibble_unit(const int kind, int i) { return kind == CODES5 ? 1 + i : i; }
INLINE int payload_bytes(int codes) { return num_units(codes) * PANEL * UNIT_BYTES; }

INLINE int step_bytes(int format) { return format & WIDE_STEPS ? 4 : (int)sizeof(scale_t); }
INLINE int steps_bytes(int format) { return PANEL * step_bytes(format) * (format & HALF_STEPS ? 2 : 1); } /* of one kind */
INLINE int header_bytes(int format) {
  return has_scales(format) ? steps_bytes(format) * (format & HAS_MINIMUM ? 2 : 1) : 0;
}
INLINE int factors_bytes(int format) { return format & HAS_FACTOR ? PANEL * num_halves(format) : 0; }
INLINE int minimum_factors_bytes(int format) { return format & HAS_MINIMUM_FACTOR ? PANEL * num_halves(format) : 0; }
INLINE int all_factors_bytes(int format) { return factors_bytes(format) + minimum_factors_bytes(format); }
INLINE int block_bytes(int format) { return all_factors_bytes(format) + payload_bytes(kind_of(format)); }
INLINE int64_t span_bytes(int format) { return header_bytes(format) + (int64_t)span_blocks(format) * block_bytes(format); }

INLINE int num_blocks(int cols) { return (cols + BLOCK - 1) / BLOCK; }
INLINE int num_spans(int format, int cols) { return (num_blocks(cols) + span_blocks(format) - 1) / span_blocks(format); }
INLINE int num_panels(int rows) { return (rows + PANEL - 1) / PANEL; }

/* Span s of the panel that holds `row`. */
INLINE uint8_t *span_of(const weight_t *w, int row, int s) {
  return w->data + ((int64_t)(row / PANEL) * num_spans(w->format, w->cols) + s) * span_bytes(w->format);
}

/* ---- what a vector of rows needs of a block ---- */

/* load_pair() of CODES6. */
INLINE void load_pair6(const uint8_t *p, int i, vi w[2]) {
  const vi mask = vi_set(0x3F3F3F3F);
  p += 3 * (i / 2) * PANEL * UNIT_BYTES;
  const vi a = vi_load(p), b = vi_load(p + PANEL * UNIT_BYTES);
  if (i % 2 == 0) {
    w[0] = vi_and(a, mask), w[1] = vi_and(b, mask);
    return;
  }
  const vi c = vi_load(p + 2 * PANEL * UNIT_BYTES);
  const vi low = vi_and(vi_shr(a, 6), vi_set(0x03030303)), middle = vi_and(vi_shr(b, 4), vi_set(0x0C0C0C0C));
  w[0] = vi_and(c, mask), w[1] = vi_or(vi_or(low, middle), vi_and(vi_shr(c, 2), vi_set(0x30303030)));
}

/* Words 2 i and 2 i + 1 of the units at p: four unsigned codes in each lane. table: of TABLE4. */
INLINE void load_pair(const int codes, const uint8_t *p, int i, vi table, vi w[2]) {
  if (codes == CODES8) {
    w[0] = vi_load(p + 2 * i * PANEL * UNIT_BYTES), w[1] = vi_load(p + (2 * i + 1) * PANEL * UNIT_BYTES);
    return;
  }
  if (codes == CODES6) {
    load_pair6(p, i, w);
    return;
  }
  const vi mask = vi_set(0x0F0F0F0F);
  vi a = vi_load(p + nibble_unit(codes, i) * PANEL * UNIT_BYTES);
  w[0] = vi_and(a, mask), w[1] = vi_and(vi_shr(a, 4), mask);
  if (codes == TABLE4) w[0] = vi_lookup(table, w[0]), w[1] = vi_lookup(table, w[1]);
  if (codes == CODES5) {
    const vi bit = vi_set(0x10101010), h = vi_load(p);
    w[0] = vi_or(w[0], vi_and(i < 2 ? vi_shl(h, 4 - 2 * i) : vi_shr(h, 2 * i - 4), bit));
    w[1] = vi_or(w[1], vi_and(i < 2 ? vi_shl(h, 3 - 2 * i) : vi_shr(h, 2 * i - 3), bit));
  }
}

INLINE vi load_table(const int codes, const weight_t *w) { return codes == TABLE4 ? vi_load_table(w->table) : vi_set(0); }

INLINE vf load_step(int format, const uint8_t *header, int half, int r) {
  const int at = (format & HALF_STEPS ? half * PANEL : 0) + r;
  return format & WIDE_STEPS ? v_load((const float *)header + at) : v_load_scale((const scale_t *)header + at);
}

/* Of VL rows from r on, for one group: the whole block or a half of it. factors: those of the block. */
INLINE vf load_scale(int format, const uint8_t *header, const uint8_t *factors, int half, int r) {
  vf d = load_step(format, header, half, r);
  return format & HAS_FACTOR ? v_mul(d, v_load_i8((const int8_t *)factors + half * PANEL + r)) : d;
}

INLINE vf load_minimum(int format, const uint8_t *header, const uint8_t *factors, int half, int r) {
  vf m = load_step(format, header + steps_bytes(format), half, r);
  return format & HAS_MINIMUM_FACTOR ? v_mul(m, v_load_u8(factors + factors_bytes(format) + half * PANEL + r)) : m;
}

#endif
