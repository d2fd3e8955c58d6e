/* Shared by the tiles of linear.c: the job, the epilogue of a result, and prefetching. */
#ifndef SS_TILE_H
#define SS_TILE_H

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

#include "weight.h"

#define FETCH_BYTES 4096

/* Rows of x that meet one panel while it is in the nearest cache: whole tiles. */
#if MAX_MT == 6
#define ROWS_PER_ITEM 72
#else
#define ROWS_PER_ITEM 64
#endif

/* Sums over a block of x: of its first 16 columns, of the others, of all. */
enum { WHOLE = 2, NUM_SUMS = 3 };
typedef struct {
  float step; /* of x, per unit of v */
  float sum[NUM_SUMS]; /* of x as quantized */
  int32_t total[NUM_SUMS]; /* of v */
} x_block;

typedef struct {
  const weight_t *w;
  const float *x; /* [m, >= padded cols] */
  float *copy; /* [m, padded cols]: x in whole blocks and in the weight's order of columns, where it is not */
  float *sums; /* [m, blocks, NUM_SUMS]: sums of x, float tiles of formats with minima only */
  int8_t *parts; /* x in two bytes or in words, integer tiles only (tile_dot.h, tile_word.h) */
  x_block *x_blocks; /* [m, blocks]: integer tiles only */
  const float *bias, *add;
  float *out;
  int64_t ldx, ldo, lda;
  int m, panels, slabs, panels_per_chunk, chunks_per_slab;
  int fetch; /* whether weights are fetched ahead */
  int prepare0, chunk0; /* the first of its items among all jobs' */
} linear_job;

typedef vf sums_t[MAX_MT][NUM_GROUPS];

/* bias, residual and store of one vector of a row; n of its lanes exist. */
INLINE void store_vector(const linear_job *j, vf value, int64_t row, int col, int n) {
  float *out = j->out + row * j->ldo + col;
  if (n >= VL) {
    if (j->bias) value = v_add(value, v_load(j->bias + col));
    if (j->add) value = v_add(value, v_load(j->add + row * j->lda + col));
    v_store(out, value);
    return;
  }
  float lane[VL];
  v_store(lane, value);
  for (int i = 0; i < n; i++) {
    if (j->bias) lane[i] += j->bias[col + i];
    if (j->add) lane[i] += j->add[row * j->lda + col + i];
    out[i] = lane[i];
  }
}

/* Weights come from memory once a step, in order. Prefetchers of Intel's processors stop at every page: fetching ahead by
 * instructions made one row 1.4 times as fast there, on AMD's Zen 5 1.1 to 1.6 times. Zen 4 does better when left alone:
 * 0.85 to 0.9 (docs/LOG.md). */
#define ZEN5_FAMILY 26
#if defined(__x86_64__) || defined(__i386__)
INLINE int find_fetching_pays(void) {
  unsigned a = 0, b, c, d;
  __builtin_cpu_init();
  __get_cpuid(1, &a, &b, &c, &d);
  return !__builtin_cpu_is("amd") || (a >> 8 & 15) + (a >> 20 & 255) >= ZEN5_FAMILY;
}

/* Asked once: a virtual machine answers slowly. */
INLINE int fetching_pays(void) {
  static int pays = -1;
  if (pays < 0) pays = find_fetching_pays();
  return pays;
}
#else
INLINE int fetching_pays(void) { return 1; }
#endif

/* A weight's format, of whose low bits the compiler knows what they are. */
INLINE int known_format(const weight_t *w, const int kind) { return (w->format & ~7) | kind; }

/* Where a panel is being read. It stays in registers as long as no function is given its address. */
typedef struct {
  const uint8_t *header; /* the steps of the span */
  const uint8_t *factors, *units; /* of the block */
} place_t;

INLINE place_t place_at(int format, const uint8_t *header, const uint8_t *block) {
  return (place_t){header, block, block + all_factors_bytes(format)};
}

INLINE place_t first_block(const weight_t *w, int panel) {
  const uint8_t *header = span_of(w, panel * PANEL, 0);
  return place_at(w->format, header, header + header_bytes(w->format));
}

/* b: the index of the block that follows. */
INLINE void next_block(int format, int b, place_t *at) {
  const uint8_t *end = at->factors + block_bytes(format);
  if ((b & (span_blocks(format) - 1)) == 0) at->header = end, end += header_bytes(format); /* a span begins */
  at->factors = end, at->units = end + all_factors_bytes(format);
}

/* The scales of a block, for each half and each vector of rows. */
typedef struct {
  vf scale[2][NUM_GROUPS];
  vi factor[2][NUM_GROUPS]; /* where words are multiplied by it: in both words of a lane */
} scales_t;

#ifdef HAS_WORDS
#define FOLDS(kind) ((kind) == CODES6) /* tile_integer.h */
INLINE void load_folded(int format, const uint8_t *header, const uint8_t *factors, scales_t *out) {
  _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++) {
    out->scale[0][g] = load_step(format, header, 0, g * VL);
    for (int half = 0; half < 2; half++)
      out->factor[half][g] = vw_load_i8((const int8_t *)factors + half * PANEL + g * VL);
  }
}
#else
#define FOLDS(kind) 0
INLINE void load_folded(int format, const uint8_t *header, const uint8_t *factors, scales_t *out) {
  (void)format, (void)header, (void)factors, (void)out;
}
#endif

INLINE void load_scales_of(int format, const uint8_t *header, const uint8_t *factors, scales_t *out) {
  if (FOLDS(kind_of(format))) {
    load_folded(format, header, factors, out);
    return;
  }
  for (int half = 0; half < num_halves(format); half++)
    _Pragma("GCC unroll 3") for (int g = 0; g < NUM_GROUPS; g++)
      out->scale[half][g] = load_scale(format, header, factors, half, g * VL);
}

/* Not inlined: formats differ in this alone, and tiles are compiled for kinds of codes. */
static __attribute__((noinline)) void load_any_scales(int format, const uint8_t *header, const uint8_t *factors,
                                                      scales_t *out) {
  load_scales_of(format, header, factors, out);
}

/* Inlined for the forms of most files: a factor and a step for 32 columns, or a step alone. Not where the factors of CODES6
 * would take registers from the sums of several rows: 3 to 7 % slower. */
INLINE void load_scales(const int kind, const int mt, int format, place_t at, scales_t *out) {
  const int form = format & (HALVES | HAS_FACTOR | WIDE_STEPS | HALF_STEPS);
  const int common = HAS_FACTOR | (kind == CODES6 ? HALVES : 0);
  if (FOLDS(kind) && mt > 1) load_any_scales(format, at.header, at.factors, out);
  else if (form == common) load_scales_of(kind | common, at.header, at.factors, out);
  else if (form == 0) load_scales_of(kind, at.header, at.factors, out);
  else load_any_scales(format, at.header, at.factors, out);
}

/* One quarter of the block FETCH_BYTES ahead: all of it at once would occupy the buffers that the block's own loads need.
 * Scales are part of the stream, 2 or 3 lines a block for most formats. */
INLINE void fetch_quarter(const int kind, const uint8_t *p, const int quarter, int fetch) {
  const int lines = payload_bytes(kind) / 64 + 3, from = lines * quarter / 4, to = lines * (quarter + 1) / 4;
  if (!fetch) return;
  _Pragma("GCC unroll 32") for (int i = from; i < to; i++) __builtin_prefetch(p + FETCH_BYTES + 64 * i, 0, 3);
}

INLINE void fetch_ahead(const int kind, const uint8_t *p, int fetch) {
  _Pragma("GCC unroll 4") for (int quarter = 0; quarter < 4; quarter++) fetch_quarter(kind, p, quarter, fetch);
}

INLINE void store_tile(const linear_job *j, const int mt, int panel, int row, sums_t acc) {
  for (int m = 0; m < mt; m++)
    for (int g = 0; g < NUM_GROUPS; g++) {
      int col = panel * PANEL + g * VL;
      store_vector(j, acc[m][g], row + m, col, j->w->rows - col);
    }
}

INLINE void clear(const int mt, sums_t s) {
  _Pragma("GCC unroll 8") for (int m = 0; m < mt; m++)
    for (int g = 0; g < NUM_GROUPS; g++) s[m][g] = v_set(0.0f);
}

#endif
