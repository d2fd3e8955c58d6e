/* GGUF's most frequent block types, read into codes, steps and factors. Layouts are llama.cpp's. */
#ifndef SS_GGUF_BLOCK_H
#define SS_GGUF_BLOCK_H

#include "weight.h"

/* The same numbers are in packed.py. */
enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, NUM_BLOCK_TYPES };

/* The weights of one row in a span, or in 32 columns. */
typedef struct {
  uint8_t u[MAX_SPAN];
  float step[2], minimum_step[2]; /* the second: HALF_STEPS */
  int8_t factor[MAX_SPAN / MIN_GROUP];
  uint8_t minimum_factor[MAX_SPAN / MIN_GROUP];
} codes_t;

INLINE float half_to_float(uint16_t h) {
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

INLINE float half_at(const uint8_t *p) {
  uint16_t h;
  memcpy(&h, p, 2);
  return half_to_float(h);
}

/* n bytes: the low nibbles, then the high ones. */
INLINE void read_nibbles(const uint8_t *p, const int n, uint8_t *u) {
  for (int i = 0; i < n; i++) u[i] = p[i] & 15, u[n + i] = p[i] >> 4;
}

/* A fifth bit for each of 32 columns. */
INLINE void read_fifth(const uint8_t *p, uint8_t *u) {
  uint32_t bits;
  memcpy(&bits, p, 4);
  for (int i = 0; i < 32; i++) u[i] |= (uint8_t)((bits >> i & 1) << 4);
}

/* 6-bit scales and minima of eight groups in 12 bytes. */
INLINE void read_scales_k(const uint8_t *p, codes_t *c) {
  for (int i = 0; i < 4; i++) {
    c->factor[i] = p[i] & 63, c->minimum_factor[i] = p[4 + i] & 63;
    c->factor[4 + i] = (int8_t)((p[8 + i] & 15) | p[i] >> 6 << 4);
    c->minimum_factor[4 + i] = (uint8_t)(p[8 + i] >> 4 | p[4 + i] >> 6 << 4);
  }
}

INLINE void read_q4_k(const uint8_t *p, codes_t *c) {
  c->step[0] = half_at(p), c->minimum_step[0] = -half_at(p + 2);
  read_scales_k(p + 4, c);
  for (int i = 0; i < 4; i++) read_nibbles(p + 16 + 32 * i, 32, c->u + 64 * i);
}

INLINE void read_q5_k(const uint8_t *p, codes_t *c) {
  c->step[0] = half_at(p), c->minimum_step[0] = -half_at(p + 2);
  read_scales_k(p + 4, c);
  for (int i = 0; i < 4; i++) read_nibbles(p + 48 + 32 * i, 32, c->u + 64 * i);
  for (int i = 0; i < 8; i++)
    for (int k = 0; k < 32; k++) c->u[32 * i + k] |= (uint8_t)((p[16 + k] >> i & 1) << 4);
}

INLINE void read_q6_k(const uint8_t *p, codes_t *c) {
  for (int half = 0; half < 2; half++) {
    const uint8_t *low = p + 64 * half, *high = p + 128 + 32 * half;
    uint8_t *u = c->u + 128 * half;
    for (int k = 0; k < 32; k++) {
      u[k] = (uint8_t)((low[k] & 15) | (high[k] & 3) << 4);
      u[32 + k] = (uint8_t)((low[32 + k] & 15) | (high[k] >> 2 & 3) << 4);
      u[64 + k] = (uint8_t)(low[k] >> 4 | (high[k] >> 4 & 3) << 4);
      u[96 + k] = (uint8_t)(low[32 + k] >> 4 | high[k] >> 6 << 4);
    }
  }
  memcpy(c->factor, p + 192, 16);
  c->step[0] = half_at(p + 208);
}

INLINE void read_iq4_xs(const uint8_t *p, codes_t *c) {
  c->step[0] = half_at(p);
  for (int i = 0; i < 8; i++) {
    const int high = (p[2] | p[3] << 8) >> 2 * i & 3, low = p[4 + i / 2] >> 4 * (i % 2) & 15;
    c->factor[i] = (int8_t)((low | high << 4) - 32);
    read_nibbles(p + 8 + 16 * i, 16, c->u + 32 * i);
  }
}

INLINE void read_small(int type, const uint8_t *p, codes_t *c) {
  const int has_minimum = type == Q4_1 || type == Q5_1, has_fifth = type == Q5_0 || type == Q5_1;
  c->step[0] = half_at(p);
  p += 2;
  if (has_minimum) c->minimum_step[0] = half_at(p), p += 2;
  if (type == Q8_0) {
    for (int i = 0; i < 32; i++) c->u[i] = p[i] ^ 128;
    return;
  }
  read_nibbles(p + (has_fifth ? 4 : 0), 16, c->u);
  if (has_fifth) read_fifth(p, c->u);
}

INLINE int gguf_block_bytes(int type) {
  static const int bytes[NUM_BLOCK_TYPES] = {18, 20, 22, 24, 34, 144, 176, 210, 18, 136};
  return bytes[type];
}

INLINE void read_gguf_block(int type, const uint8_t *p, codes_t *c) {
  if (type == Q4_K) read_q4_k(p, c);
  else if (type == Q5_K) read_q5_k(p, c);
  else if (type == Q6_K) read_q6_k(p, c);
  else if (type == IQ4_XS) read_iq4_xs(p, c);
  else read_small(type, p, c);
}

#endif
