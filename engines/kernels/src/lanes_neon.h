// Sixteen lanes in four registers of Arm's Advanced SIMD with dot products.
#pragma once

#include <arm_neon.h>

struct V {
  float32x4_t v[4];
};
struct I {
  int32x4_t v[4];
};
struct W {
  int8x16_t v[4];
};

constexpr int kRows = 2, kPanels = 1;
constexpr bool kSigned = true;

#define SPECEXPORT_EACH(type, expression) type r; for (int i = 0; i < 4; ++i) r.v[i] = expression; return r
static inline V load(const float* p) { SPECEXPORT_EACH(V, vld1q_f32(p + 4 * i)); }
static inline void store(float* p, V x) { for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]); }
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
static inline V set1(float x) { SPECEXPORT_EACH(V, vdupq_n_f32(x)); }
static inline V add(V x, V y) { SPECEXPORT_EACH(V, vaddq_f32(x.v[i], y.v[i])); }
static inline V sub(V x, V y) { SPECEXPORT_EACH(V, vsubq_f32(x.v[i], y.v[i])); }
static inline V mul(V x, V y) { SPECEXPORT_EACH(V, vmulq_f32(x.v[i], y.v[i])); }
static inline V div(V x, V y) { SPECEXPORT_EACH(V, vdivq_f32(x.v[i], y.v[i])); }
static inline V larger(V x, V y) { SPECEXPORT_EACH(V, vmaxq_f32(x.v[i], y.v[i])); }
static inline V smaller(V x, V y) { SPECEXPORT_EACH(V, vminq_f32(x.v[i], y.v[i])); }
static inline V fma(V x, V y, V z) { SPECEXPORT_EACH(V, vfmaq_f32(z.v[i], x.v[i], y.v[i])); }
static inline V absolute(V x) { SPECEXPORT_EACH(V, vabsq_f32(x.v[i])); }
static inline float total(V x) {
  float32x4_t s = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
  float32x2_t t = vadd_f32(vget_low_f32(s), vget_high_f32(s));
  return vget_lane_f32(t, 0) + vget_lane_f32(t, 1);
}
static inline float largest(V x) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.v[0], x.v[1]), vmaxq_f32(x.v[2], x.v[3])));
}
static inline V totals(const V* x) {
  float all[16];
  for (int i = 0; i < 16; ++i) all[i] = total(x[i]);
  return load(all);
}
static inline V rounded(V x) { SPECEXPORT_EACH(V, vrndnq_f32(x.v[i])); }
static inline V power2(V n) {
  SPECEXPORT_EACH(V, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23)));
}
static inline int32_t bytes(V x, int8_t* out) {
  int16x8_t low = vcombine_s16(vmovn_s32(vcvtq_s32_f32(x.v[0])), vmovn_s32(vcvtq_s32_f32(x.v[1])));
  int16x8_t high = vcombine_s16(vmovn_s32(vcvtq_s32_f32(x.v[2])), vmovn_s32(vcvtq_s32_f32(x.v[3])));
  vst1q_s8(out, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
  return vaddlvq_s16(low) + vaddlvq_s16(high);
}

static inline I seti(int32_t x) { SPECEXPORT_EACH(I, vdupq_n_s32(x)); }
static inline I loadi(const int32_t* p) { SPECEXPORT_EACH(I, vld1q_s32(p + 4 * i)); }
static inline I subtract_product(I x, I y, int32_t k) { SPECEXPORT_EACH(I, vmlsq_n_s32(x.v[i], y.v[i], k)); }
static inline V real(I x) { SPECEXPORT_EACH(V, vcvtq_f32_s32(x.v[i])); }
static inline W weights8(const uint8_t* p) { SPECEXPORT_EACH(W, vreinterpretq_s8_u8(vld1q_u8(p + 16 * i))); }
static inline void weights4(const uint8_t* p, W* low, W* high) {
  for (int i = 0; i < 4; ++i) {
    uint8x16_t both = vld1q_u8(p + 16 * i);
    low->v[i] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
    high->v[i] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
  }
}
static inline void dot(I* sum, const W& w, const int8_t* a) {
  int32_t four;
  __builtin_memcpy(&four, a, 4);
  int8x16_t all = vreinterpretq_s8_s32(vdupq_n_s32(four));
  for (int i = 0; i < 4; ++i) sum->v[i] = vdotq_s32(sum->v[i], w.v[i], all);
}
static inline void dot4(I* sum, const W& w, const int8_t* a) { dot(sum, w, a); }
#undef SPECEXPORT_EACH
