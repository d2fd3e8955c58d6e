/* A dot tile on the matrix unit of recent Xeons: the integer sums of a block for all its rows in one instruction.
 *
 * The sums are the same integers as in tile_dot.h and meet the same float operations in the same order, so the bits are
 * the same; only the time differs. The unit reads tiles from memory, so a block's weights are unpacked to a buffer that
 * stays in the nearest cache. That pays for full tiles of MAX_MT rows only: with fewer, moving data takes longer than the
 * byte products do (docs/LOG.md).
 */
#ifndef SS_TILE_AMX_H
#define SS_TILE_AMX_H

#include "tile_dot.h"

#if defined(HAS_DOT) && VL == 16 && defined(__AMX_INT8__) && defined(__linux__)
#define HAS_AMX 1

#include <sys/syscall.h>
#include <unistd.h>

/* The kernel grants the unit's large registers on request, once for the process. */
INLINE int amx_allowed(void) {
  static int answer = -1;
  if (answer < 0) answer = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
  return answer;
}

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} tile_config;

/* Tiles 0 to 2: the sums of the three groups; 3 to 5: their weights; 6: high bytes of the rows of x above the low. */
INLINE void amx_begin(void) {
  tile_config c = {.palette = 1};
  for (int g = 0; g < NUM_GROUPS; g++) c.rows[g] = 2 * MAX_MT, c.row_bytes[g] = 64;
  for (int g = NUM_GROUPS; g < 2 * NUM_GROUPS; g++) c.rows[g] = NUM_WORDS, c.row_bytes[g] = 64;
  c.rows[6] = 2 * MAX_MT, c.row_bytes[6] = BLOCK;
  _tile_loadconfig(&c);
}

INLINE void amx_end(void) { _tile_release(); }

typedef int32_t words_t[NUM_GROUPS][NUM_WORDS * VL] __attribute__((aligned(64)));
typedef int32_t dots_t[NUM_GROUPS][2 * MAX_MT * VL] __attribute__((aligned(64)));

INLINE void unpack_block(const int kind, const uint8_t *p, vi table, words_t words) {
  _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
    _Pragma("GCC unroll 4") for (int i = 0; i < NUM_WORDS / 2; i++) {
      vi w[2];
      load_pair(kind, p + g * VL * UNIT_BYTES, i, table, w);
      vi_store(words[g] + 2 * i * VL, w[0]);
      vi_store(words[g] + (2 * i + 1) * VL, w[1]);
    }
  }
}

INLINE void multiply_block(const int8_t *parts, words_t words, dots_t dots) {
  _tile_loadd(6, parts, BLOCK);
  _tile_loadd(3, words[0], 64);
  _tile_zero(0);
  _tile_dpbsud(0, 6, 3);
  _tile_loadd(4, words[1], 64);
  _tile_zero(1);
  _tile_dpbsud(1, 6, 4);
  _tile_loadd(5, words[2], 64);
  _tile_zero(2);
  _tile_dpbsud(2, 6, 5);
  _tile_stored(0, dots[0], 64);
  _tile_stored(1, dots[1], 64);
  _tile_stored(2, dots[2], 64);
}

INLINE void finish_block(int format, const place_t *at, const x_block *x, int blocks, dots_t dots,
                         sums_t acc) {
  scales_t scales;
  load_any_scales(format, at->header, at->factors, &scales);
  _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
    _Pragma("GCC unroll 8") for (int m = 0; m < MAX_MT; m++) {
      const x_block *own = x + (int64_t)m * blocks;
      vi high = vi_load(dots[g] + m * VL), rest = vi_load(dots[g] + (MAX_MT + m) * VL);
      vi t = vi_add(vi_add(vi_shl(high, 7), rest), start_of(format, own, WHOLE));
      acc[m][g] = add_dot(scales.scale[0][g], t, own, acc[m][g]);
    }
  }
}

/* Three blocks are under way at a time: one being unpacked, one in the matrix unit, one being added up. Groups of 32 columns. */
INLINE void tile_amx(const linear_job *j, const int kind, int panel, int row) {
  const int blocks = num_blocks(j->w->cols), format = j->w->format;
  const x_block *x = j->x_blocks + (int64_t)row * blocks;
  const vi table = load_table(kind, j->w);
  place_t at[3] = {first_block(j->w, panel)}; /* of the block being unpacked, and of the two before it */
  words_t words[2];
  dots_t dots[2];
  sums_t acc;
  clear(MAX_MT, acc);
  for (int b = 0; b < blocks + 2; b++) {
    if (b < blocks) {
      fetch_ahead(kind, at[0].units, j->fetch);
      unpack_block(kind, at[0].units, table, words[b & 1]);
    }
    if (b >= 2) finish_block(format, at + 2, x + b - 2, blocks, dots[b & 1], acc);
    if (b >= 1 && b <= blocks)
      multiply_block(parts_of(j->parts, blocks, row, b - 1), words[(b - 1) & 1], dots[(b - 1) & 1]);
    at[2] = at[1], at[1] = at[0];
    next_block(format, b + 1, at);
  }
  finish_tile(j, MAX_MT, panel, row, acc);
}

#endif
#endif
