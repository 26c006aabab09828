// Sixteen lanes in one register of AVX-512, with VNNI.
#pragma once

#include <immintrin.h>

using V = __m512;
using I = __m512i;
using W = __m512i;

constexpr int kRows = 4, kPanels = 4;
constexpr bool kSigned = false;

static inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
static inline V load(const float* p) { return _mm512_loadu_ps(p); }
static inline V load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
static inline void store(float* p, V a) { _mm512_storeu_ps(p, a); }
static inline void store_n(float* p, V a, int n) { _mm512_mask_storeu_ps(p, first(n), a); }
static inline V set1(float x) { return _mm512_set1_ps(x); }
static inline V add(V a, V b) { return _mm512_add_ps(a, b); }
static inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
static inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
static inline V div(V a, V b) { return _mm512_div_ps(a, b); }
static inline V larger(V a, V b) { return _mm512_max_ps(a, b); }
static inline V smaller(V a, V b) { return _mm512_min_ps(a, b); }
static inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
static inline V absolute(V a) { return _mm512_abs_ps(a); }
static inline __m128 quarter(V a) {  // lanes l + 8, then l + 4
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
static inline float total(V a) {
  __m128 s = quarter(a);
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
static inline float largest(V a) { return _mm512_reduce_max_ps(a); }
// total() of sixteen vectors at once: each step adds two halves of two vectors.
static inline V totals(const V* a) {
  V b[8], c[4], d[2];
  for (int i = 0; i < 8; ++i)
    b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x44),
                         _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xEE));
  for (int i = 0; i < 4; ++i)
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xDD));
  for (int i = 0; i < 2; ++i)
    d[i] = _mm512_add_ps(_mm512_shuffle_ps(c[2 * i], c[2 * i + 1], 0x44),
                         _mm512_shuffle_ps(c[2 * i], c[2 * i + 1], 0xEE));
  V e = _mm512_add_ps(_mm512_shuffle_ps(d[0], d[1], 0x88), _mm512_shuffle_ps(d[0], d[1], 0xDD));
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), e);
}
static inline V rounded(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline V power2(V n) {
  I exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
}
static inline int32_t bytes(V a, int8_t* out) {
  I whole = _mm512_cvtps_epi32(a);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(whole));
  return _mm512_reduce_add_epi32(whole);
}

static inline I seti(int32_t x) { return _mm512_set1_epi32(x); }
static inline I loadi(const int32_t* p) { return _mm512_loadu_si512(p); }
static inline I subtract_product(I a, I b, int32_t x) {
  return _mm512_sub_epi32(a, _mm512_mullo_epi32(b, _mm512_set1_epi32(x)));
}
static inline V real(I a) { return _mm512_cvtepi32_ps(a); }
static inline W weights8(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline void weights4(const uint8_t* p, W* low, W* high) {
  W both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
  *low = _mm512_and_si512(both, mask);
  *high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
}
static inline void dot(I* sum, W w, const int8_t* a) {
  int32_t four;
  __builtin_memcpy(&four, a, 4);
  // As written: GCC moves each sum to another register and back around the intrinsic, which costs a third of the time.
  __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(w), "v"(_mm512_set1_epi32(four)));
}
static inline void dot4(I* sum, W w, const int8_t* a) { dot(sum, w, a); }
