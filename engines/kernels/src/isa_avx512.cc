// The kernels with avx512 lanes. Nothing that other files compile too may be inlined here: the linker would keep one copy of
// it, perhaps with instructions that a machine has not.
#include <immintrin.h>

#include "kernels.h"

namespace specexport {
namespace avx512 {
#include "lanes_avx512.h"
#include "rows.inc"
#include "product.inc"
#include "attention.inc"
}  // namespace avx512

const Kernels kAvx512 = {"avx512",           avx512::kSigned,  avx512::norm_row, avx512::quantize_row,
                          avx512::product, avx512::prepare, avx512::attend,  avx512::survey};
}  // namespace specexport
