// Matrices of MatMulNBits laid out for the kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels.h"

namespace specexport {

// A packed matrix with its memory.
class PackedMatrix {
 public:
  // The matrix of these arguments (the constructor's), or an equal one that is there already: graphs that call a matrix
  // several times, as an unrolled drafter's do, keep it once, and it stays in the processor's cache between the calls.
  template <typename... Arguments>
  static std::shared_ptr<const PackedMatrix> shared(Arguments... arguments) {
    return kept(std::make_shared<const PackedMatrix>(arguments...));
  }

  // codes: [outputs, blocks, block * bits / 8]; scales: [outputs, blocks]; zeros: [outputs, ceil(blocks * bits / 8)] or
  // null. alternate: the first half of the outputs are gates of the second, and their panels take turns.
  PackedMatrix(const uint8_t* codes, const float* scales, const uint8_t* zeros, int outputs, int width, int block,
               int bits, bool alternate);
  ~PackedMatrix();
  PackedMatrix(const PackedMatrix&) = delete;
  PackedMatrix& operator=(const PackedMatrix&) = delete;

  const Matrix& view() const { return view_; }

 private:
  static std::shared_ptr<const PackedMatrix> kept(std::shared_ptr<const PackedMatrix> made);
  uint64_t digest() const;
  bool operator==(const PackedMatrix& other) const;

  Matrix view_{};
  size_t bytes_ = 0;
  void* memory_ = nullptr;
};

}  // namespace specexport
