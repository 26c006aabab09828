// The kernels that this machine runs fastest.
#pragma once

#include "kernels.h"

namespace specexport {

// Chosen once: the best set that the processor has, or the one that SPECEXPORT_KERNELS_ISA names, if it has it.
const Kernels& kernels();

}  // namespace specexport
