#include "product_op.h"

#include <algorithm>

#include "select.h"

namespace specexport {
namespace {

// Calls whose rows and codes are less work than this, in products, are not worth a second thread.
constexpr double kSerialWork = 150e3;
// And rows of fewer values than this are not worth one to be made ready.
constexpr int64_t kSerialValues = 2048;
// Sums of a block's products of codes, at most 256 * 127 each, stay within 31 bits.
constexpr int kLargestBlock = 65536;
// More outputs or values of a row than any model has; sizes made of them stay within 63 bits.
constexpr int kLargestSize = 1 << 27;

}  // namespace

std::shared_ptr<const PackedMatrix> packed_constant(const Api& api, const OrtKernelInfo* info, size_t index, int outputs,
                                                    int width, int bits, int block, Gate gate) {
  expect(bits == 4 || bits == 8, "bits must be 4 or 8");
  expect(outputs >= 0 && outputs <= kLargestSize && width > 0 && width <= kLargestSize, "N and K must be 1 to 2^27");
  expect(block >= 16 && block % 16 == 0 && block <= kLargestBlock,
         "block_size must be a multiple of 16, at most 65536");
  const int64_t blocks = (static_cast<int64_t>(width) + block - 1) / block;
  const Tensor codes = constant(api, info, index), scales = constant(api, info, index + 1),
               zeros = constant(api, info, index + 2);
  expect(codes && scales, "codes and scales must be constants");
  if (outputs == 0) outputs = static_cast<int>(std::min<int64_t>(scales.count() / blocks, kLargestSize));
  expect(outputs > 0 && codes.count() == outputs * blocks * block * bits / 8,
         "codes have another size than N, K and block_size say");
  expect(scales.count() == outputs * blocks, "scales have another size than N, K and block_size say");
  expect(!zeros || zeros.count() == outputs * ((blocks * bits + 7) / 8),
         "zero points have another size than N, K and block_size say");
  expect(gate == kNoGate || outputs % (2 * kLanes) == 0, "a gate needs a multiple of 32 outputs");
  return PackedMatrix::shared(codes.as<uint8_t>(), scales.floats(), zeros ? zeros.as<uint8_t>() : nullptr, outputs,
                              width, block, bits, gate != kNoGate);
}

void expect_packed_zeros(const Api& api, const OrtKernelContext* context, size_t index, const Matrix& matrix) {
  const OrtValue* zeros = nullptr;
  check(api, api.input(context, index, &zeros));
  expect(zeros == nullptr || matrix.zeros != nullptr, "zero points must be constants");
}

void multiply(const Threads& threads, const Matrix& matrix, const Product& product) {
  const int64_t rows = product.rows, width = product.width;
  if (rows == 0) return;
  thread_local std::vector<int8_t> codes;
  thread_local std::vector<float> scales;
  thread_local std::vector<int32_t> sums;
  auto* row_codes = scratch(codes, static_cast<size_t>(rows * matrix.width + 64));
  auto* row_scales = scratch(scales, static_cast<size_t>(rows * matrix.blocks));
  auto* row_sums = scratch(sums, static_cast<size_t>(rows * matrix.blocks));
  const auto prepare = [&](size_t index) {
    thread_local std::vector<float> normed;
    const auto row = static_cast<int64_t>(index);
    const float* from = product.x + row * width;
    if (product.gamma != nullptr || product.skip != nullptr || product.sum != nullptr) {
      float* to = scratch(normed, static_cast<size_t>(width));
      float* kept = product.sum != nullptr ? product.sum + row * width : to;
      kernels().norm(from, product.skip != nullptr ? product.skip + row * width : nullptr, product.gamma,
                     product.epsilon, product.width, kept, to);
      from = product.gamma != nullptr ? to : kept;
    }
    kernels().quantize(from, product.width, matrix.block, matrix.blocks, row_codes + row * matrix.width,
                       row_scales + row * matrix.blocks, row_sums + row * matrix.blocks);
  };
  if (rows * width < kSerialValues)
    for (int64_t row = 0; row < rows; ++row) prepare(static_cast<size_t>(row));
  else
    threads.each(static_cast<size_t>(rows), prepare);
  const Rows packed{row_codes, row_scales, row_sums};
  // Pieces are small, so that threads end together, and even: a gate and its value are neighbours.
  const int piece = 4;
  const int64_t columns = product.gate == kNoGate ? matrix.outputs : matrix.outputs / 2;
  const double work = static_cast<double>(rows) * matrix.outputs * matrix.width;
  const size_t pieces = work < kSerialWork ? 1 : static_cast<size_t>((matrix.panels + piece - 1) / piece);
  threads.each(pieces, [&](size_t index) {
    const int first = pieces == 1 ? 0 : static_cast<int>(index) * piece;
    const int count = pieces == 1 ? matrix.panels : std::min(piece, matrix.panels - first);
    kernels().product(matrix, packed, static_cast<int>(rows), first, count, product.gate, product.out, columns);
  });
}

QuantizedProduct::QuantizedProduct(const Api& api, const OrtKernelInfo* info) : api_(api) {
  const int outputs = integer(api, info, "N");
  width_ = integer(api, info, "K");
  const int bits = integer(api, info, "bits"), block = integer(api, info, "block_size");
  const int gate = integer(api, info, "gate");
  epsilon_ = real(api, info, "epsilon");
  expect(outputs > 0, "N and K must be 1 to 2^27");
  expect(gate <= kGeluTanh, "gate must be 0, 1 or 2");
  gate_ = static_cast<Gate>(gate);
  matrix_ = packed_constant(api, info, 1, outputs, width_, bits, block, gate_);
}

void QuantizedProduct::compute(OrtKernelContext* context) {
  const Matrix& matrix = matrix_->view();
  expect_packed_zeros(api_, context, 3, matrix);
  const Tensor x = input(api_, context, 0), gamma = input(api_, context, 4), skip = input(api_, context, 5);
  expect(!x.dims.empty() && x.dims.back() == width_, "x has another width than the matrix");
  expect(!gamma || gamma.count() == width_, "the norm has another width than the matrix");
  expect(!skip || skip.dims == x.dims, "x and skip differ in shape");
  const int64_t rows = x.count() / width_;
  expect(rows <= INT32_MAX, "x has too many rows");
  std::vector<int64_t> dims = x.dims;
  dims.back() = gate_ == kNoGate ? matrix.outputs : matrix.outputs / 2;
  float* y = output<float>(api_, context, 0, dims);
  float* sum = output<float>(api_, context, 1, x.dims);
  const Product product{rows, width_, x.floats(), skip ? skip.floats() : nullptr, gamma ? gamma.floats() : nullptr,
                        epsilon_, gate_, sum, y};
  multiply({api_, context}, matrix, product);
}

}  // namespace specexport
