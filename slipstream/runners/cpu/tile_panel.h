/* Many rows of x against one panel, on machines that multiply 16-bit words in pairs and bytes only into 16 bits (AVX2, AVX-512
 * without VNNI): see tile_integer.h for the sums, which are the same integers.
 *
 * A few blocks of the panel are unpacked to words in the nearest cache, less the offset, with their scales; then all rows meet
 * them, as many at a time as registers hold sums for. So an instruction that unpacks is shared by all rows, and what is left
 * for each is the product, the addition, and a third of the loads.
 */
#ifndef SS_TILE_PANEL_H
#define SS_TILE_PANEL_H

#include "tile_word.h"

#if defined(HAS_WORDS) && !defined(HAS_DOT)
#define HAS_PANELS 1
#define PANEL_BLOCKS 8 /* unpacked at a time: 12 KB of words */
#define NUM_PAIRS (BLOCK / 2)

/* From how many rows on it is faster, measured (docs/LOG.md): soon where codes take more than a shift and a mask. */
INLINE int panel_min_rows(int kind) {
#if WORD_MT < MAX_MT
  return UNPACKS(kind) ? MAX_MT + 1 : kind == CODES4 ? 3 * MAX_MT : INT32_MAX;
#else
  return UNPACKS(kind) ? 3 * MAX_MT : INT32_MAX;
#endif
}

typedef struct {
  vi words[PANEL_BLOCKS][NUM_PAIRS][NUM_GROUPS];
  vf scale[PANEL_BLOCKS][2][NUM_GROUPS];
} panel_words;

typedef vf row_sums[NUM_GROUPS];

/* In how many sums a block is added up: factors of CODES6 multiply its words. */
INLINE int panel_sums(int format) { return FOLDS(kind_of(format)) ? 1 : num_halves(format); }

INLINE void unpack_block(const int kind, int format, vi table, place_t at, int fetch, vi words[NUM_PAIRS][NUM_GROUPS],
                         vf scale[2][NUM_GROUPS]) {
  const vi offset = vi_set(offset_of(format) * 0x10001);
  scales_t s;
  unpacked_t bytes;
  load_any_scales(format, at.header, at.factors, &s);
  memcpy(scale, s.scale, sizeof s.scale);
  unpack(kind, at.units, table, bytes);
  _Pragma("GCC unroll 4") for (int i = 0; i < BLOCK / 8; i++) {
    fetch_quarter(kind, at.units, i, fetch);
    _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++)
      _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
        const vi u = load_word(kind, at.units + g * VL * UNIT_BYTES, bytes[i][g], i, k);
        words[4 * i + k][g] = FOLDS(kind) ? folded(kind, u, &s, i / 2, g) : vw_sub(u, offset);
      }
  }
}

/* `count` blocks from b on. Returns where the next one is. */
INLINE place_t unpack_blocks_of(const int kind, const linear_job *j, int b, int count, place_t at, panel_words *to) {
  const int format = known_format(j->w, kind);
  const vi table = load_table(kind, j->w);
  for (int i = 0; i < count; next_block(format, b + ++i, &at))
    unpack_block(kind, format, table, at, j->fetch, to->words[i], to->scale[i]);
  return at;
}

static __attribute__((noinline)) place_t unpack_blocks(const linear_job *j, int b, int count, place_t at, panel_words *to) {
  switch (kind_of(j->w->format)) {
    case CODES4: return unpack_blocks_of(CODES4, j, b, count, at, to);
    case TABLE4: return unpack_blocks_of(TABLE4, j, b, count, at, to);
    case CODES5: return unpack_blocks_of(CODES5, j, b, count, at, to);
    default: return unpack_blocks_of(CODES6, j, b, count, at, to);
  }
}

/* mt rows of x from `row` on against the blocks b .. b + count - 1. */
INLINE void panel_rows_of(const int sums, const int mt, const linear_job *j, const panel_words *w, int row, int b, int count,
                          row_sums *acc) {
  const int blocks = num_blocks(j->w->cols), each = NUM_PAIRS / sums;
  const int16_t *x = (const int16_t *)parts_of(j->parts, blocks, row, b) + row % MAX_MT * BLOCK;
  const x_block *x_at = j->x_blocks + (int64_t)row * blocks + b;
  for (int i = 0; i < count; i++, x += MAX_MT * BLOCK, x_at++)
    _Pragma("GCC unroll 2") for (int half = 0; half < sums; half++) {
      vi sum[WORD_MT][NUM_GROUPS];
      _Pragma("GCC unroll 16") for (int pair = half * each; pair < (half + 1) * each; pair++) {
        vi u[NUM_GROUPS];
        _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
          u[g] = w->words[i][pair][g];
          IN_REGISTER(u[g]); /* else it would be loaded again for every row */
        }
        _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++) {
          const vi v = vi_set(word_at(x + m * BLOCK, pair));
          _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
            sum[m][g] = pair == half * each ? vw_dot(u[g], v) : vw_add_dot(sum[m][g], u[g], v);
            IN_REGISTER(sum[m][g]);
          }
        }
      }
      HIDE(acc); /* else what is stored here would be kept for the next block, on the stack */
      _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++)
        _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++)
          acc[m][g] = add_dot(w->scale[i][half][g], sum[m][g], x_at + (int64_t)m * blocks, acc[m][g]);
    }
}

/* Rows from .. last - 1, mt at a time; returns the first that is left. */
INLINE int panel_rows_by(const int mt, const linear_job *j, const panel_words *w, int from, int last, int b, int count,
                         row_sums *acc) {
  const int sums = panel_sums(j->w->format);
  for (; from + mt <= last; from += mt, acc += mt)
    if (sums == 1) panel_rows_of(1, mt, j, w, from, b, count, acc);
    else panel_rows_of(2, mt, j, w, from, b, count, acc);
  return from;
}

static __attribute__((noinline)) void panel_rows(const linear_job *j, const panel_words *w, int first, int last, int b,
                                                 int count, row_sums *acc) {
  int row = panel_rows_by(WORD_MT, j, w, first, last, b, count, acc);
  if (WORD_MT > 4) row = panel_rows_by(4, j, w, row, last, b, count, acc + row - first);
  row = panel_rows_by(2, j, w, row, last, b, count, acc + row - first);
  panel_rows_by(1, j, w, row, last, b, count, acc + row - first);
}

/* Rows first .. last - 1, at most ROWS_PER_ITEM of them. */
static void tile_panel(const linear_job *j, int panel, int first, int last) {
  const int blocks = num_blocks(j->w->cols);
  place_t at = first_block(j->w, panel);
  panel_words words;
  row_sums acc[ROWS_PER_ITEM];
  for (int i = 0; i < last - first; i++) clear(1, acc + i);
  for (int b = 0; b < blocks; b += PANEL_BLOCKS) {
    const int count = blocks - b < PANEL_BLOCKS ? blocks - b : PANEL_BLOCKS;
    at = unpack_blocks(j, b, count, at, &words);
    panel_rows(j, &words, first, last, b, count, acc);
  }
  for (int row = first; row < last; row += MAX_MT)
    finish_tile(j, last - row < MAX_MT ? last - row : MAX_MT, panel, row, acc + row - first);
}

#endif
#endif
