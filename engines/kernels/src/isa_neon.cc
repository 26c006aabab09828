// The kernels with neon lanes. Nothing that other files compile too may be inlined here: the linker would keep one copy of
// it, perhaps with instructions that a machine has not.
#include <arm_neon.h>

#include "kernels.h"

namespace specexport {
namespace neon {
#include "lanes_neon.h"
#include "rows.inc"
#include "product.inc"
#include "attention.inc"
}  // namespace neon

const Kernels kNeon = {"neon",           neon::kSigned,  neon::norm_row, neon::quantize_row,
                          neon::product, neon::prepare, neon::attend,  neon::survey};
}  // namespace specexport
