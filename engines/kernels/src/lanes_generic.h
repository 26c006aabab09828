// Sixteen lanes in plain C++; the definition of what the other sets must give.
#pragma once

struct V {
  float v[16];
};
struct I {
  int32_t v[16];
};
struct W {
  int8_t v[64];
};

constexpr int kRows = 2, kPanels = 1;
constexpr bool kSigned = true;

static inline V load(const float* p) { V r; __builtin_memcpy(&r, p, 64); return r; }
static inline V load_n(const float* p, int n) { V r{}; for (int i = 0; i < n; ++i) r.v[i] = p[i]; return r; }
static inline void store(float* p, const V& a) { __builtin_memcpy(p, &a, 64); }
static inline void store_n(float* p, const V& a, int n) { for (int i = 0; i < n; ++i) p[i] = a.v[i]; }
static inline V set1(float x) { V r; for (float& e : r.v) e = x; return r; }
#define SPECEXPORT_LANEWISE(name, expression) \
  static inline V name(const V& a, const V& b) { V r; for (int i = 0; i < 16; ++i) r.v[i] = expression; return r; }
SPECEXPORT_LANEWISE(add, a.v[i] + b.v[i])
SPECEXPORT_LANEWISE(sub, a.v[i] - b.v[i])
SPECEXPORT_LANEWISE(mul, a.v[i] * b.v[i])
SPECEXPORT_LANEWISE(div, a.v[i] / b.v[i])
SPECEXPORT_LANEWISE(larger, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
SPECEXPORT_LANEWISE(smaller, a.v[i] < b.v[i] ? a.v[i] : b.v[i])
#undef SPECEXPORT_LANEWISE
static inline V fma(const V& a, const V& b, const V& c) {
  V r;
  for (int i = 0; i < 16; ++i) r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return r;
}
static inline V absolute(const V& a) { V r; for (int i = 0; i < 16; ++i) r.v[i] = __builtin_fabsf(a.v[i]); return r; }
static inline float total(const V& a) {
  float s[8];
  for (int i = 0; i < 8; ++i) s[i] = a.v[i] + a.v[i + 8];
  for (int i = 0; i < 4; ++i) s[i] += s[i + 4];
  return (s[0] + s[2]) + (s[1] + s[3]);
}
static inline float largest(const V& a) {
  float m = a.v[0];
  for (float e : a.v) m = e > m ? e : m;
  return m;
}
static inline V totals(const V* a) { V r; for (int i = 0; i < 16; ++i) r.v[i] = total(a[i]); return r; }
// x rounded to whole numbers, and 2 to the power of n for whole n in [-126, 127]; of a NaN anything.
static inline V rounded(const V& a) { V r; for (int i = 0; i < 16; ++i) r.v[i] = __builtin_rintf(a.v[i]); return r; }
static inline V power2(const V& n) {
  V r;
  for (int i = 0; i < 16; ++i) {
    const float shifted = n.v[i] + 8388735.0f;  // 2^23 + 127: the lowest bits are n + 127
    uint32_t bits;
    __builtin_memcpy(&bits, &shifted, 4);
    bits <<= 23;
    __builtin_memcpy(&r.v[i], &bits, 4);
  }
  return r;
}
// Whole numbers in [-127, 127] as bytes; their sum.
static inline int32_t bytes(const V& a, int8_t* out) {
  int32_t s = 0;
  for (int i = 0; i < 16; ++i) { out[i] = static_cast<int8_t>(a.v[i]); s += out[i]; }
  return s;
}

static inline I seti(int32_t x) { I r; for (int32_t& e : r.v) e = x; return r; }
static inline I loadi(const int32_t* p) { I r; __builtin_memcpy(&r, p, 64); return r; }
static inline I subtract_product(const I& a, const I& b, int32_t x) {
  I r; for (int i = 0; i < 16; ++i) r.v[i] = a.v[i] - b.v[i] * x; return r;
}
static inline V real(const I& a) { V r; for (int i = 0; i < 16; ++i) r.v[i] = static_cast<float>(a.v[i]); return r; }
static inline W weights8(const uint8_t* p) { W r; __builtin_memcpy(&r, p, 64); return r; }
static inline void weights4(const uint8_t* p, W* low, W* high) {
  for (int i = 0; i < 64; ++i) { low->v[i] = p[i] & 15; high->v[i] = p[i] >> 4; }
}
// Adds to each lane the product of its four codes and four codes of a row.
static inline void dot(I* sum, const W& w, const int8_t* a) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 4; ++j) sum->v[i] += w.v[4 * i + j] * a[j];
}
static inline void dot4(I* sum, const W& w, const int8_t* a) { dot(sum, w, a); }
