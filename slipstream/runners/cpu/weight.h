/* How a packed weight lies in memory.
 *
 * Output rows are grouped in panels of PANEL = 3 VL rows, input columns in blocks of 32. A panel is one sequential
 * stream: block after block, and inside a block unit after unit, each unit holding the same columns of all its rows
 *
 *     unit (i, r) at (i * PANEL + r) * UNIT_BYTES        i = which columns, r = row in the panel
 *
 * followed by PANEL scales and, for W4M, PANEL minima. So a vector load yields one column (or eight) of VL rows, and
 * no kernel ever adds across lanes. Rows and columns are padded with zeros.
 *
 *     W4, W4M   4 units of 8 nibbles, two's complement of q - 8       w = d (q - 8)     w = d q + m
 *     W8        8 units of 4 int8: of 8 columns the even, then the odd   w = d q
 *     BF16      16 units of two bfloat16, the even column low
 *     F32       32 units of one float
 */
#ifndef SS_WEIGHT_H
#define SS_WEIGHT_H

#include "simd.h"

#define NUM_GROUPS 3
#define PANEL (NUM_GROUPS * VL)
#define BLOCK 32

enum { W4 = 0, W4M = 1, W8 = 2, BF16 = 3, F32 = 4, STACK = 5 };

/* The same struct is declared in packed.py. A STACK is other weights, one below the other: data points to their addresses. */
typedef struct {
  int32_t format;
  int32_t rows;
  int32_t cols;
  int32_t num_parts; /* of a STACK */
  uint8_t *data;
} weight_t;

#define UNIT_BYTES 4
INLINE int num_units(int format) { return format <= W4M ? 4 : format == W8 ? 8 : format == BF16 ? 16 : 32; }
INLINE int num_scales(int format) { return format == W4M ? 2 : format <= W8 ? 1 : 0; }
INLINE int payload_bytes(int format) { return num_units(format) * PANEL * UNIT_BYTES; }
INLINE int block_bytes(int format) { return payload_bytes(format) + num_scales(format) * PANEL * (int)sizeof(scale_t); }
INLINE int num_blocks(int cols) { return (cols + BLOCK - 1) / BLOCK; }
INLINE int num_panels(int rows) { return (rows + PANEL - 1) / PANEL; }

/* Where column k of a block lies in W8: unit 2 (k / 8) + k % 2, byte (k % 8) / 2. */
INLINE int w8_offset(int k, int r) { return ((2 * (k / 8) + k % 2) * PANEL + r) * UNIT_BYTES + (k % 8) / 2; }

/* Block b of the panel that holds `row`. */
INLINE uint8_t *block_of(const weight_t *w, int row, int b) {
  return w->data + ((int64_t)(row / PANEL) * num_blocks(w->cols) + b) * block_bytes(w->format);
}

#endif
