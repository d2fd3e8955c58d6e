/* A float vector as wide as the machine's, and the few operations the kernels need on it.
 *
 * VL lanes: 16 with AVX-512, 8 with AVX2 + FMA, 4 with anything the compiler's vector extension covers (SSE2, NEON).
 * The order of additions inside a kernel follows from VL, so two instruction sets may differ in the last bit; two
 * calls on one machine never do. Define SS_PORTABLE to force the last kind.
 */
#ifndef SS_SIMD_H
#define SS_SIMD_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && !defined(SS_PORTABLE)
#include <immintrin.h>
#ifdef __AVX512VNNI__
#define SS_ISA "avx512-vnni"
#define HAS_DOT 1
#else
#define SS_ISA "avx512"
#endif
#define VL 16
#define SCALE_F16 1
#define MAX_MT 8
typedef __m512 vf;
typedef __m512i vi;
INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
INLINE vf v_set(float a) { return _mm512_set1_ps(a); }
INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE void vi_store(void *p, vi a) { _mm512_storeu_si512(p, a); }
INLINE vi vi_set(int32_t a) { return _mm512_set1_epi32(a); }
INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
INLINE vi vi_mul(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
INLINE vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
INLINE vi vi_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
INLINE vi vi_shl(vi a, int n) { return _mm512_slli_epi32(a, (unsigned)n); }
INLINE vi vi_shr(vi a, int n) { return _mm512_srli_epi32(a, (unsigned)n); }
INLINE vi vi_sra(vi a, int n) { return _mm512_srai_epi32(a, (unsigned)n); }
INLINE vf v_from_int(vi a) { return _mm512_cvtepi32_ps(a); }
INLINE vi v_round(vf a) { return _mm512_cvtps_epi32(a); }
INLINE vf v_cast(vi a) { return _mm512_castsi512_ps(a); }
INLINE vi vi_cast(vf a) { return _mm512_castps_si512(a); }
/* a > b ? c : d, lane by lane. */
INLINE vf v_pick_gt(vf a, vf b, vf c, vf d) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), d, c);
}
INLINE vi vi_pick_gt(vf a, vf b, vi c, vi d) {
  return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), d, c);
}
INLINE vf v_load_i8(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE vf v_load_u8(const uint8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* A table of 16 bytes, and the entries that the bytes of `at` name. */
INLINE vi vi_load_table(const uint8_t *p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)); }
INLINE vi vi_lookup(vi table, vi at) { return _mm512_shuffle_epi8(table, at); }
INLINE vf v_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

#ifdef HAS_DOT
/* acc + the sum over four bytes of w (unsigned) times x (signed), lane by lane; vw_add_dot: over two signed words. */
INLINE vi vi_dot(vi acc, vi w, vi x) { return _mm512_dpbusd_epi32(acc, w, x); }
#define HAS_WORD_DOT 1
INLINE vi vw_add_dot(vi acc, vi w, vi x) { return _mm512_dpwssd_epi32(acc, w, x); }
#else
INLINE vi vw_dot(vi w, vi x) { return _mm512_madd_epi16(w, x); }
INLINE vi vw_add_dot(vi acc, vi w, vi x) { return vi_add(acc, vw_dot(w, x)); }
/* Sums of two products of bytes, w unsigned and x signed, as two words in each lane; they must fit. */
INLINE vi vb_dot(vi w, vi x) { return _mm512_maddubs_epi16(w, x); }
INLINE vi vw_add(vi a, vi b) { return _mm512_add_epi16(a, b); }
#endif
/* Each lane as two 16-bit words. */
#define HAS_WORDS 1
INLINE vi vw_shr(vi a, int n) { return _mm512_srli_epi16(a, (unsigned)n); }
INLINE vi vw_sub(vi a, vi b) { return _mm512_sub_epi16(a, b); }
INLINE vi vw_mul(vi a, vi b) { return _mm512_mullo_epi16(a, b); }
INLINE vi vw_load_i8(const int8_t *p) { /* a byte in both words of a lane */
  const vi twice = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13));
  return _mm512_shuffle_epi8(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)), twice);
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(SS_PORTABLE)
#include <immintrin.h>
#ifdef __AVXVNNI__
#define SS_ISA "avx2-vnni"
#define HAS_DOT 1
#define MAX_MT 4
#else
#define SS_ISA "avx2"
#define MAX_MT 6
#define FLOAT_MT 4
#define WORD_MT 3
#endif
#define VL 8
#define SCALE_F16 1
typedef __m256 vf;
typedef __m256i vi;
INLINE vf v_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void v_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
INLINE vf v_set(float a) { return _mm256_set1_ps(a); }
INLINE vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vi vi_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE void vi_store(void *p, vi a) { _mm256_storeu_si256((__m256i *)p, a); }
INLINE vi vi_set(int32_t a) { return _mm256_set1_epi32(a); }
INLINE vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
INLINE vi vi_sub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
INLINE vi vi_mul(vi a, vi b) { return _mm256_mullo_epi32(a, b); }
INLINE vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
INLINE vi vi_or(vi a, vi b) { return _mm256_or_si256(a, b); }
INLINE vi vi_xor(vi a, vi b) { return _mm256_xor_si256(a, b); }
INLINE vi vi_shl(vi a, int n) { return _mm256_slli_epi32(a, n); }
INLINE vi vi_shr(vi a, int n) { return _mm256_srli_epi32(a, n); }
INLINE vi vi_sra(vi a, int n) { return _mm256_srai_epi32(a, n); }
INLINE vf v_from_int(vi a) { return _mm256_cvtepi32_ps(a); }
INLINE vi v_round(vf a) { return _mm256_cvtps_epi32(a); }
INLINE vf v_cast(vi a) { return _mm256_castsi256_ps(a); }
INLINE vi vi_cast(vf a) { return _mm256_castps_si256(a); }
INLINE vf v_pick_gt(vf a, vf b, vf c, vf d) { return _mm256_blendv_ps(d, c, _mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
INLINE vi vi_pick_gt(vf a, vf b, vi c, vi d) { return vi_cast(v_pick_gt(a, b, v_cast(c), v_cast(d))); }
INLINE vf v_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE vf v_load_i8(const int8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE vf v_load_u8(const uint8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE vi vi_load_table(const uint8_t *p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)); }
INLINE vi vi_lookup(vi table, vi at) { return _mm256_shuffle_epi8(table, at); }
#ifdef HAS_DOT
INLINE vi vi_dot(vi acc, vi w, vi x) { return _mm256_dpbusd_avx_epi32(acc, w, x); }
#endif
#define HAS_WORDS 1
INLINE vi vw_dot(vi w, vi x) { return _mm256_madd_epi16(w, x); }
INLINE vi vw_add_dot(vi acc, vi w, vi x) { return vi_add(acc, vw_dot(w, x)); }
INLINE vi vb_dot(vi w, vi x) { return _mm256_maddubs_epi16(w, x); }
INLINE vi vw_add(vi a, vi b) { return _mm256_add_epi16(a, b); }
INLINE vi vw_shr(vi a, int n) { return _mm256_srli_epi16(a, n); }
INLINE vi vw_sub(vi a, vi b) { return _mm256_sub_epi16(a, b); }
INLINE vi vw_mul(vi a, vi b) { return _mm256_mullo_epi16(a, b); }
INLINE vi vw_load_i8(const int8_t *p) {
  const vi twice = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13));
  return _mm256_shuffle_epi8(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)), twice);
}

#else
#define SS_ISA "portable"
#define VL 4
#if defined(__aarch64__)
#define MAX_MT 8 /* 32 registers */
#else
#define MAX_MT 4
#endif
typedef float vf __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(16), aligned(4), may_alias));
INLINE vf v_load(const float *p) { return *(const vf *)p; }
INLINE void v_store(float *p, vf a) { *(vf *)p = a; }
INLINE vf v_set(float a) { return (vf){a, a, a, a}; }
INLINE vf v_add(vf a, vf b) { return a + b; }
INLINE vf v_sub(vf a, vf b) { return a - b; }
INLINE vf v_mul(vf a, vf b) { return a * b; }
INLINE vf v_div(vf a, vf b) { return a / b; }
#if defined(__aarch64__)
#include <arm_neon.h>
INLINE vf v_fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
INLINE vf v_fma(vf a, vf b, vf c) { return a * b + c; } /* rounded twice: build.py forbids contraction */
#endif
INLINE vi vi_load(const void *p) { return *(const vi *)p; }
INLINE vi vi_set(int32_t a) { return (vi){a, a, a, a}; }
INLINE vi vi_add(vi a, vi b) { return (vi)((vu)a + (vu)b); }
INLINE vi vi_sub(vi a, vi b) { return (vi)((vu)a - (vu)b); }
INLINE vi vi_mul(vi a, vi b) { return (vi)((vu)a * (vu)b); }
INLINE vi vi_and(vi a, vi b) { return a & b; }
INLINE vi vi_or(vi a, vi b) { return a | b; }
INLINE vi vi_xor(vi a, vi b) { return a ^ b; }
INLINE vi vi_shl(vi a, int n) { return (vi)((vu)a << n); }
INLINE vi vi_shr(vi a, int n) { return (vi)((vu)a >> n); }
INLINE vi vi_sra(vi a, int n) { return a >> n; }
INLINE vf v_from_int(vi a) { return __builtin_convertvector(a, vf); }
INLINE vf v_cast(vi a) { return (vf)a; }
INLINE vi vi_cast(vf a) { return (vi)a; }
INLINE vi vi_pick_gt(vf a, vf b, vi c, vi d) {
  vi mask = (vi)(a > b);
  return (mask & c) | (~mask & d);
}
INLINE vf v_pick_gt(vf a, vf b, vf c, vf d) { return v_cast(vi_pick_gt(a, b, vi_cast(c), vi_cast(d))); }
INLINE vf v_max(vf a, vf b) { return v_pick_gt(a, b, a, b); }
INLINE vf v_min(vf a, vf b) { return v_pick_gt(a, b, b, a); }
INLINE vi v_round(vf a) { /* adding 1.5 * 2^23 leaves the nearest integer in the low bits; |a| < 2^22 */
  return vi_sub(vi_cast(v_add(a, v_set(12582912.0f))), vi_set(0x4B400000));
}
INLINE vf v_load_i8(const int8_t *p) { return (vf){p[0], p[1], p[2], p[3]}; }
INLINE vf v_load_u8(const uint8_t *p) { return (vf){p[0], p[1], p[2], p[3]}; }
INLINE vi vi_load_table(const uint8_t *p) { return vi_load(p); }
INLINE vi vi_lookup(vi table, vi at) {
#if defined(__aarch64__)
  return (vi)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)at);
#endif
  uint8_t entry[16], byte[16];
  memcpy(entry, &table, 16);
  memcpy(byte, &at, 16);
  for (int i = 0; i < 16; i++) byte[i] = entry[byte[i] & 15];
  return vi_load(byte);
}
#endif

/* A tile has up to MAX_MT rows of x, FLOAT_MT if it multiplies floats, and the registers hold the sums of WORD_MT of them where
 * words are multiplied. */
#ifndef FLOAT_MT
#define FLOAT_MT MAX_MT
#define WORD_MT MAX_MT
#endif

/* Byte j of each lane, unsigned, less the offset. */
INLINE vf v_byte(vi a, int j, vi offset) {
  vi wide = j == 3 ? vi_shr(a, 24) : vi_and(j ? vi_shr(a, 8 * j) : a, vi_set(255));
  return v_from_int(vi_sub(wide, offset));
}

/* Scales are kept as halves where the machine converts them in one instruction, else as floats. */
#ifdef SCALE_F16
typedef uint16_t scale_t;
INLINE vf v_load_scale(const scale_t *p) { return v_load_f16(p); }
#else
typedef float scale_t;
INLINE vf v_load_scale(const scale_t *p) { return v_load(p); }
#endif

/* Sum of all lanes: the upper half is folded onto the lower until one is left. */
INLINE float v_sum(vf a) {
#if VL == 16
  return _mm512_reduce_add_ps(a);
#endif
  float lane[VL];
  v_store(lane, a);
  for (int half = VL / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lane[i] += lane[i + half];
  return lane[0];
}

INLINE float v_hmax(vf a) {
#if VL == 16
  return _mm512_reduce_max_ps(a);
#endif
  float lane[VL], best;
  v_store(lane, a);
  best = lane[0];
  for (int i = 1; i < VL; i++) best = lane[i] > best ? lane[i] : best;
  return best;
}

INLINE vi vi_iota(void) {
  int32_t lane[VL];
  for (int i = 0; i < VL; i++) lane[i] = i;
  return vi_load(lane);
}

/* Transposes a VL x VL square in registers. */
INLINE void v_transpose(vf r[VL]) {
#if VL == 16
  vf t[16];
  for (int i = 0; i < 16; i += 4) { /* 4 x 4 squares inside the 128-bit lanes */
    vf a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
    vf c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm512_shuffle_ps(a, c, 0x44), t[i + 1] = _mm512_shuffle_ps(a, c, 0xEE);
    t[i + 2] = _mm512_shuffle_ps(b, d, 0x44), t[i + 3] = _mm512_shuffle_ps(b, d, 0xEE);
  }
  for (int i = 0; i < 4; i++) { /* then the 4 x 4 arrangement of the lanes themselves */
    vf a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x44), b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xEE);
    vf c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x44), d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xEE);
    r[i] = _mm512_shuffle_f32x4(a, c, 0x88), r[i + 4] = _mm512_shuffle_f32x4(a, c, 0xDD);
    r[i + 8] = _mm512_shuffle_f32x4(b, d, 0x88), r[i + 12] = _mm512_shuffle_f32x4(b, d, 0xDD);
  }
#elif VL == 8
  vf t[8];
  for (int i = 0; i < 8; i += 4) {
    vf a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
    vf c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm256_shuffle_ps(a, c, 0x44), t[i + 1] = _mm256_shuffle_ps(a, c, 0xEE);
    t[i + 2] = _mm256_shuffle_ps(b, d, 0x44), t[i + 3] = _mm256_shuffle_ps(b, d, 0xEE);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
  }
#else
  for (int i = 0; i < VL; i++)
    for (int j = i + 1; j < VL; j++) {
      float a = r[i][j];
      r[i][j] = r[j][i];
      r[j][i] = a;
    }
#endif
}

/* e^x to about 1e-7 for x <= 88; 0 below -87 (no denormals). */
INLINE vf v_exp(vf x) {
  vf tiny = v_set(-87.0f), low = v_max(v_min(x, v_set(88.0f)), tiny);
  vi n = v_round(v_mul(low, v_set(1.44269504088896341f)));
  vf f = v_from_int(n);
  vf r = v_fma(f, v_set(-0.693145751953125f), low); /* ln 2 in two parts, the first exact in few bits */
  r = v_fma(f, v_set(-1.42860682030941723e-6f), r);
  vf p = v_set(1.0f / 5040);
  p = v_fma(p, r, v_set(1.0f / 720));
  p = v_fma(p, r, v_set(1.0f / 120));
  p = v_fma(p, r, v_set(1.0f / 24));
  p = v_fma(p, r, v_set(1.0f / 6));
  p = v_fma(p, r, v_set(0.5f));
  p = v_fma(p, r, v_set(1.0f));
  p = v_fma(p, r, v_set(1.0f));
  vf y = v_mul(p, v_cast(vi_shl(vi_add(n, vi_set(127)), 23)));
  return v_pick_gt(tiny, x, v_set(0.0f), y);
}

/* Natural logarithm of a positive normal number to about 1e-7 relative: x = 2^e m with m in [sqrt(1/2), sqrt(2)),
 * log m = 2 atanh((m - 1) / (m + 1)). Near x = 1 the result stays accurate because m - 1 is exact. */
INLINE vf v_log(vf x) {
  vi bits = vi_sub(vi_cast(x), vi_set(0x3F3504F3));
  vi e = vi_sra(bits, 23);
  vf m = v_cast(vi_add(vi_and(bits, vi_set(0x007FFFFF)), vi_set(0x3F3504F3)));
  vf one = v_set(1.0f), s = v_div(v_sub(m, one), v_add(m, one)), z = v_mul(s, s);
  vf p = v_set(2.0f / 9);
  p = v_fma(p, z, v_set(2.0f / 7));
  p = v_fma(p, z, v_set(2.0f / 5));
  p = v_fma(p, z, v_set(2.0f / 3));
  vf tail = v_mul(v_mul(p, z), s); /* log m = 2 s + s z p */
  vf f = v_from_int(e);
  vf low = v_fma(f, v_set(1.42860682030941723e-6f), tail);
  return v_fma(f, v_set(0.693145751953125f), v_add(v_add(s, s), low));
}

#endif
