// QuantizedProduct: y = norm(x + skip) times a matrix of codes, maybe gated.
//   x [.., K] f32; codes, scales, zeros? as MatMulNBits has them, constant; gamma? [K] f32; skip? [.., K] f32
//   -> y [.., N] or with a gate [.., N / 2]; sum? [.., K] = x + skip
//   attributes N, K, bits, block_size, gate (0 none, 1 silu, 2 tanh gelu; of the first half of N on the second), epsilon
#pragma once

#include <memory>

#include "call.h"
#include "packed.h"

namespace specexport {

// What a product is made of.
struct Product {
  int64_t rows;
  int width;               // of a row; columns of the matrix behind it are zero
  const float *x, *skip;   // [rows, width]; skip may be null
  const float* gamma;      // [width] or null
  float epsilon;
  Gate gate;
  float* sum;  // [rows, width] or null
  float* out;  // [rows, outputs], half of them with a gate
};

void multiply(const Threads& threads, const Matrix& matrix, const Product& product);

// A matrix whose codes, scales and zero points (or none) are the constants from input `index` on. outputs: 0 for as many
// as there are.
std::shared_ptr<const PackedMatrix> packed_constant(const Api& api, const OrtKernelInfo* info, size_t index, int outputs,
                                                    int width, int bits, int block, Gate gate);

// That zero points, an input of this call, are the constants of the matrix: what is no constant was not packed.
void expect_packed_zeros(const Api& api, const OrtKernelContext* context, size_t index, const Matrix& matrix);

class QuantizedProduct {
 public:
  static constexpr const char* kName = "QuantizedProduct";
  static constexpr ElementType kInputs[] = {kFloat, kUint8, kFloat, kUint8, kFloat, kFloat};
  static constexpr Presence kInputPresence[] = {kRequired, kRequired, kRequired, kOptional, kOptional, kOptional};
  static constexpr ElementType kOutputs[] = {kFloat, kFloat};
  static constexpr Presence kOutputPresence[] = {kRequired, kOptional};

  QuantizedProduct(const Api& api, const OrtKernelInfo* info);
  const Api& api() const { return api_; }
  void compute(OrtKernelContext* context);

 private:
  Api api_;
  Gate gate_ = kNoGate;
  int width_ = 0;
  float epsilon_ = 0;
  std::shared_ptr<const PackedMatrix> matrix_;
};

}  // namespace specexport
