// The kernels with generic lanes. Nothing that other files compile too may be inlined here: the linker would keep one copy of
// it, perhaps with instructions that a machine has not.
#include "kernels.h"

namespace specexport {
namespace generic {
#include "lanes_generic.h"
#include "rows.inc"
#include "product.inc"
#include "attention.inc"
}  // namespace generic

const Kernels kGeneric = {"generic",           generic::kSigned,  generic::norm_row, generic::quantize_row,
                          generic::product, generic::prepare, generic::attend,  generic::survey};
}  // namespace specexport
