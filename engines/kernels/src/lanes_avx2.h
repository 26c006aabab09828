// Sixteen lanes in two registers of AVX2 with FMA.
#pragma once

#include <immintrin.h>

struct V {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
struct W {
  __m256i a, b;
};

constexpr int kRows = 2, kPanels = 1;
constexpr bool kSigned = true;

static inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, V x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
static inline V load_n(const float* p, int n) {
  float all[16] = {};
  __builtin_memcpy(all, p, 4 * static_cast<unsigned>(n));
  return load(all);
}
static inline void store_n(float* p, V x, int n) {
  float all[16];
  store(all, x);
  __builtin_memcpy(p, all, 4 * static_cast<unsigned>(n));
}
static inline V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline V div(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline V larger(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline V smaller(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline V absolute(V x) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
static inline float total(V x) {
  __m256 half = _mm256_add_ps(x.a, x.b);
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
static inline float largest(V x) {
  __m256 half = _mm256_max_ps(x.a, x.b);
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
static inline __m256 totals8(const V* x) {
  __m256 b[8], c[4], d[2];
  for (int i = 0; i < 8; ++i) b[i] = _mm256_add_ps(x[i].a, x[i].b);
  for (int i = 0; i < 4; ++i)
    c[i] = _mm256_add_ps(_mm256_permute2f128_ps(b[i], b[i + 4], 0x20), _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
  for (int i = 0; i < 2; ++i)
    d[i] = _mm256_add_ps(_mm256_shuffle_ps(c[2 * i], c[2 * i + 1], 0x44), _mm256_shuffle_ps(c[2 * i], c[2 * i + 1], 0xEE));
  return _mm256_add_ps(_mm256_shuffle_ps(d[0], d[1], 0x88), _mm256_shuffle_ps(d[0], d[1], 0xDD));
}
static inline V totals(const V* x) { return {totals8(x), totals8(x + 8)}; }
static inline V rounded(V x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
static inline __m256 power2(__m256 n) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
static inline V power2(V n) { return {power2(n.a), power2(n.b)}; }
static inline int32_t bytes(V x, int8_t* out) {
  int32_t all[16], s = 0;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(all), _mm256_cvtps_epi32(x.a));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(all + 8), _mm256_cvtps_epi32(x.b));
  for (int i = 0; i < 16; ++i) { out[i] = static_cast<int8_t>(all[i]); s += all[i]; }
  return s;
}

static inline I seti(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline __m256i loadi8(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
static inline I loadi(const int32_t* p) { return {loadi8(p), loadi8(p + 8)}; }
static inline I subtract_product(I x, I y, int32_t k) {
  __m256i all = _mm256_set1_epi32(k);
  return {_mm256_sub_epi32(x.a, _mm256_mullo_epi32(y.a, all)), _mm256_sub_epi32(x.b, _mm256_mullo_epi32(y.b, all))};
}
static inline V real(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline W weights8(const uint8_t* p) { return {loadi8(p), loadi8(p + 32)}; }
static inline void weights4(const uint8_t* p, W* low, W* high) {
  W both = weights8(p);
  __m256i mask = _mm256_set1_epi8(15);
  *low = {_mm256_and_si256(both.a, mask), _mm256_and_si256(both.b, mask)};
  *high = {_mm256_and_si256(_mm256_srli_epi16(both.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(both.b, 4), mask)};
}
// Pairs are summed in 16 bits, which holds two products of at most 128 * 127.
static inline __m256i dot8(__m256i sum, __m256i unsigned_codes, __m256i signed_codes) {
  __m256i pairs = _mm256_maddubs_epi16(unsigned_codes, signed_codes);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
static inline __m256i four_codes(const int8_t* a) {
  int32_t four;
  __builtin_memcpy(&four, a, 4);
  return _mm256_set1_epi32(four);
}
static inline void dot(I* sum, W w, const int8_t* a) {
  __m256i all = four_codes(a);
  sum->a = dot8(sum->a, _mm256_abs_epi8(w.a), _mm256_sign_epi8(all, w.a));
  sum->b = dot8(sum->b, _mm256_abs_epi8(w.b), _mm256_sign_epi8(all, w.b));
}
static inline void dot4(I* sum, W w, const int8_t* a) {  // codes are not negative
  __m256i all = four_codes(a);
  sum->a = dot8(sum->a, w.a, all);
  sum->b = dot8(sum->b, w.b, all);
}
