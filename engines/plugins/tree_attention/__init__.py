"""``specexport::TreeAttention``: attention of a speculative step over an in-place cache, commit included.

One CUDA source without TensorRT (``launch.cu``, C interface in ``tree_attention.h``), which a host compiler builds
too (``emulator.h``); plugins around it for TensorRT in C++ (``tensorrt/``) and Python (:mod:`.plugin`). README.md says
how to build them; ``exporter.passes.tree_attention`` puts the operator into a target graph.
"""

DOMAIN, OPERATOR, VERSION = "specexport", "TreeAttention", "1"
#: Inputs and outputs of the node, in order. ``present_*`` share the memory of ``past_*``.
INPUTS = ("query", "key", "value", "past_k", "past_v", "tree", "positions", "past", "write", "commit", "order")
OUTPUTS = ("output", "present_k", "present_v")
#: Head widths the kernels are compiled for.
HEAD_DIMS = (64, 80, 96, 128, 256)
