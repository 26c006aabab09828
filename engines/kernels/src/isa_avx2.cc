// The kernels with avx2 lanes. Nothing that other files compile too may be inlined here: the linker would keep one copy of
// it, perhaps with instructions that a machine has not.
#include <immintrin.h>

#include "kernels.h"

namespace specexport {
namespace avx2 {
#include "lanes_avx2.h"
#include "rows.inc"
#include "product.inc"
#include "attention.inc"
}  // namespace avx2

const Kernels kAvx2 = {"avx2",           avx2::kSigned,  avx2::norm_row, avx2::quantize_row,
                          avx2::product, avx2::prepare, avx2::attend,  avx2::survey};
}  // namespace specexport
