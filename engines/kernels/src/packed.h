// Matrices of MatMulNBits laid out for the kernels.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace specexport {

// A packed matrix with its memory.
class PackedMatrix {
 public:
  // codes: [outputs, blocks, block * bits / 8]; scales: [outputs, blocks]; zeros: [outputs, ceil(blocks * bits / 8)] or
  // null. alternate: the first half of the outputs are gates of the second, and their panels take turns.
  PackedMatrix(const uint8_t* codes, const float* scales, const uint8_t* zeros, int outputs, int width, int block,
               int bits, bool alternate);
  ~PackedMatrix();
  PackedMatrix(const PackedMatrix&) = delete;
  PackedMatrix& operator=(const PackedMatrix&) = delete;

  const Matrix& view() const { return view_; }

 private:
  Matrix view_{};
  void* memory_ = nullptr;
};

}  // namespace specexport
