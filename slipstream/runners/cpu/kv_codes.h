/* Keys and values as FP8 (e4m3) codes: a byte each, and one scale, a bfloat16, for those of a head at a position. A block
 * holds the codes of its heads and positions, then their scales. runners/torch/caches.py is the reference: the same
 * codes, and decoded the same numbers. */
#ifndef SS_KV_CODES_H
#define SS_KV_CODES_H

#include "simd.h"

INLINE int64_t coded_block_bytes(int rows, int dim) { return (int64_t)rows * (dim + 2); }

/* row: of a block's heads times positions. */
INLINE int64_t scale_offset(int rows, int dim, int64_t row) { return (int64_t)rows * dim + 2 * row; }

INLINE float load_scale(const uint8_t *p) {
  uint16_t half;
  memcpy(&half, p, 2);
  uint32_t bits = (uint32_t)half << 16;
  float scale;
  memcpy(&scale, &bits, 4);
  return scale;
}

/* VL codes times their scale, of which factor_of makes a factor. */
#if VL >= 8
/* A half with a code's bits below its sign is the code's value times 2^-8, also where it is subnormal. */
INLINE vf factor_of(float scale) { return v_set(256.0f * scale); }
INLINE vf v_decode(const uint8_t *p, vf factor) {
#if VL == 16
  __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
  return v_mul(_mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((short)0xBF80))), factor);
#else
  __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p)), 7);
  return v_mul(_mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16((short)0xBF80))), factor);
#endif
}
#else
/* The same in a float: times 2^-120. */
INLINE vf factor_of(float scale) { return v_set(scale); }
INLINE vf v_decode(const uint8_t *p, vf factor) {
  vi code = {(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]};
  vi bits = vi_and(vi_shl(code, 20), vi_set((int32_t)0x87F00000));
  return v_mul(v_mul(v_cast(bits), v_set(0x1p120f)), factor);
}
#endif

INLINE void decode_row(const uint8_t *codes, float scale, int dim, float *out) {
  vf factor = factor_of(scale);
  for (int d = 0; d < dim; d += VL) v_store(out + d, v_decode(codes + d, factor));
}

/* |x| < 448 as a code, in the low byte of each lane: rounded to the nearest, ties to even. Not a number: 0x7F. */
INLINE vi code_of(vf x) {
  vi bits = vi_cast(x), sign = vi_and(vi_shr(bits, 24), vi_set(0x80));
  bits = vi_and(bits, vi_set(0x7FFFFFFF));
  vi half = vi_add(vi_set(0x7FFFF), vi_and(vi_shr(bits, 20), vi_set(1)));
  vi normal = vi_sub(vi_shr(vi_add(bits, half), 20), vi_set((127 - 7) << 3));
  /* Below 2^-6 codes are multiples of 2^-9, the last bit of floats from 2^14 to 2^15. */
  vi small = vi_sub(vi_cast(v_add(v_cast(bits), v_set(0x1p14f))), vi_set(0x46800000));
  vi code = vi_pick_gt(v_set(0x1p-6f), v_cast(bits), small, normal);
  return vi_or(sign, vi_pick_gt(v_set(448.0f), v_cast(bits), code, vi_set(0x7F)));
}

/* The largest magnitude over 256, rounded to the nearest bfloat16, ties to even; not below the least normal one. */
INLINE uint16_t scale_bits(const float *x, int dim) {
  vi magnitude = vi_set(0x7FFFFFFF);
  vf largest = v_set(0.0f);
  for (int d = 0; d < dim; d += VL) largest = v_max(v_cast(vi_and(vi_cast(v_load(x + d)), magnitude)), largest);
  float scale = v_hmax(largest) / 256.0f;
  uint32_t bits;
  memcpy(&bits, &scale, 4);
  bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return (uint16_t)(bits < 0x80 ? 0x80 : bits);
}

INLINE void encode_row(const float *x, int dim, uint8_t *codes, uint8_t *scale) {
  uint16_t stored = scale_bits(x, dim);
  memcpy(scale, &stored, 2);
  vf divisor = v_set(load_scale(scale));
  int32_t lanes[VL];
  for (int d = 0; d < dim; d += VL) {
    vi code = code_of(v_div(v_load(x + d), divisor));
    memcpy(lanes, &code, sizeof lanes);
    for (int i = 0; i < VL; i++) codes[d + i] = (uint8_t)lanes[i];
  }
}

#endif
