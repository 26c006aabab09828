// GrowTree: the tree of a recurrent drafter of one layer, below its root. It is EAGLE-2's (Li et al. 2024, arXiv
// 2406.16858): expand the best nodes of each depth, pool every candidate, keep the best by log probability of their paths.
// A depth is left out, with all below it, where the nodes it would expand are right less often than `least`, all together.
//   logits [.., V] f32 of the root, state [.., H] that it feeds back, noise [depth, n] added to the first n <= V logits of
//   each depth, past [1] i64 and tokens [1, A] i64 (past + A rows of the caches are seen), cache_k [1, Hkv, S, D],
//   cache_v, cos? [P, R], sin?, embedding? [ids, He] or embedding_codes? i8 with embedding_scales? [ids, blocks],
//   vocabulary? [V] i64 (target ids), embedding_norm? [He], hidden_norm? [H], input_norm? [H], mlp_norm [H], norm? [H],
//   query_norm? [D], key_norm? [D], and codes, scales, zeros? of fuse?, qkv, output, gate_up, down and lm_head
//   -> draft_tokens [N] i64, draft_parents [N] i64 (0 is the root, i + 1 node i), draft_logprobs [N] f32; N <= nodes
//   attributes num_heads, kv_num_heads, topk, depth, nodes, gate (as QuantizedProduct), hidden_first (of what is joined),
//   norm_residual, feed_normed, scale, epsilon, least; width, bits and block of each matrix as qkv_width, ...
// With `fuse` embedding and hidden state are projected; without, the layer's attention reads both side by side.
#pragma once

#include <memory>

#include "attention_op.h"
#include "call.h"
#include "packed.h"
#include "product_op.h"

namespace specexport {

class GrowTree {
 public:
  static constexpr const char* kName = "GrowTree";
  enum Input {
    kLogits, kState, kNoise, kPast, kTokens, kCacheK, kCacheV, kCosine, kSine, kEmbedding, kEmbeddingCodes,
    kEmbeddingScales, kVocabulary, kEmbeddingNorm, kHiddenNorm, kInputNorm, kMlpNorm, kNorm, kQueryNorm, kKeyNorm,
    kMatrices
  };
  static constexpr ElementType kInputs[] = {
      kFloat, kFloat, kFloat, kInt64, kInt64, kFloat, kFloat, kFloat, kFloat, kFloat, kInt8, kFloat, kInt64,
      kFloat, kFloat, kFloat, kFloat, kFloat, kFloat, kFloat,
      kUint8, kFloat, kUint8, kUint8, kFloat, kUint8, kUint8, kFloat, kUint8,
      kUint8, kFloat, kUint8, kUint8, kFloat, kUint8, kUint8, kFloat, kUint8};
  static constexpr Presence kInputPresence[] = {
      kRequired, kRequired, kRequired, kRequired, kRequired, kRequired, kRequired, kOptional, kOptional, kOptional,
      kOptional, kOptional, kOptional, kOptional, kOptional, kOptional, kRequired, kOptional, kOptional, kOptional,
      kOptional, kOptional, kOptional, kRequired, kRequired, kOptional, kRequired, kRequired, kOptional,
      kRequired, kRequired, kOptional, kRequired, kRequired, kOptional, kRequired, kRequired, kOptional};
  static constexpr ElementType kOutputs[] = {kInt64, kInt64, kFloat};
  static constexpr Presence kOutputPresence[] = {kRequired, kRequired, kRequired};

  GrowTree(const Api& api, const OrtKernelInfo* info);
  const Api& api() const { return api_; }
  void compute(OrtKernelContext* context);

 private:
  struct Call;   // the tensors of a call, checked
  struct Level;  // the nodes of a depth that are expanded
  struct Pool;   // every candidate so far

  // A matrix of the layer; empty where there is none.
  struct Part {
    std::shared_ptr<const PackedMatrix> matrix;
    int width = 0;
  };

  Part part(const OrtKernelInfo* info, const char* name, int place, Gate gate) const;
  Call read(const OrtKernelContext* context) const;
  void grow(const Threads& threads, const Call& call, Pool& pool) const;
  void embed(const Call& call, int64_t token, float* row) const;
  void expand(const Threads& threads, const Call& call, int depth, Level& level) const;
  void find_best(const Threads& threads, const Call& call, int depth, int64_t rows, float* logits,
                 Level& level) const;
  void select(OrtKernelContext* context, const Pool& pool) const;

  Api api_;
  int heads_ = 0, kv_heads_ = 0, topk_ = 0, depth_ = 0, nodes_ = 0;
  bool hidden_first_ = false, norm_residual_ = false, feed_normed_ = false;
  float scale_ = 0, epsilon_ = 0, least_ = 0;
  Gate gate_ = kNoGate;
  Part fuse_, qkv_, output_, gate_up_, down_, lm_head_;
};

}  // namespace specexport
