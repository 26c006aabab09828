// TreeAttention: rotation, cache and attention of a layer.
//   query [1, T, Hq D] or all three packed, key? [1, T, Hkv D], value?, past_k [1, Hkv, S, D], past_v, cos? [P, R], sin?,
//   positions [1, T] i64, past [1] i64, tree? [1, T, T] bool (a chain without), query_norm? [D], key_norm? [D]
//   -> [1, T, Hq D], present_k, present_v (where they are bound to the same memory nothing is copied)
//   attributes num_heads, kv_num_heads, window (0 none), scale, epsilon
#pragma once

#include "call.h"
#include "kernels.h"

namespace specexport {

// What the operators take: heads of 1 to kLargestHead values.
constexpr int64_t kLargestHead = 1024;

// Attention of prepared nodes on the session's threads.
void attend_all(const Threads& threads, const Attention& call);

// Rotation tables, which come together or not at all, into a call. largest: the largest position of the call.
void use_tables(Attention& call, const Tensor& cosine, const Tensor& sine, int64_t largest);

class TreeAttention {
 public:
  static constexpr const char* kName = "TreeAttention";
  static constexpr ElementType kInputs[] = {kFloat, kFloat, kFloat, kFloat, kFloat, kFloat,
                                            kFloat, kInt64, kInt64, kBool,  kFloat, kFloat};
  static constexpr Presence kInputPresence[] = {kRequired, kOptional, kOptional, kRequired, kRequired, kOptional,
                                                kOptional, kRequired, kRequired, kOptional, kOptional, kOptional};
  static constexpr ElementType kOutputs[] = {kFloat, kFloat, kFloat};
  static constexpr Presence kOutputPresence[] = {kRequired, kRequired, kRequired};

  TreeAttention(const Api& api, const OrtKernelInfo* info);
  const Api& api() const { return api_; }
  void compute(OrtKernelContext* context);

 private:
  float* present(OrtKernelContext* context, size_t index, const Tensor& past) const;

  Api api_;
  int heads_ = 0, kv_heads_ = 0, window_ = 0;
  float scale_ = 0, epsilon_ = 0;
};

}  // namespace specexport
