"""From what a user asks for to a plan: defaults, and combinations that make no sense."""

from __future__ import annotations

from dataclasses import dataclass

from specexport.exporter.quantize.plan import FLOATS, NVFP4_BLOCK, Format, Plan, Quantizer
from specexport.exporter.quantize.rtn import quantizer as round_to_nearest
from specexport.runtime.errors import UsageError
from specexport.runtime.manifest import GPU_FORMATS, PrecisionInfo

#: Inputs that share a scale unless told otherwise. int8: a row, which TensorRT takes too. int4: the most exact of the
#: usual widths.
BLOCKS = {"int8": 0, "int4": 32, "fp8": 0, "nvfp4": NVFP4_BLOCK}


@dataclass(frozen=True, slots=True)
class PrecisionOptions:
    """What ``build`` was asked for; None is the default of :func:`resolve`.

    Attributes:
        precision: of the layers' matrices. lm_head, embedding: of those tables.
        block_size: inputs that share a scale, 0 for a row (int8, int4).
        activations: between the products, and in caches.
        symmetric: integer codes without zero points; TensorRT takes no others.
        exact: on the CPU compute even numbers of rows, which give a row the same result whatever their number, so that
            speculative decoding has plain decoding's tokens.
    """

    precision: str = "fp32"
    lm_head: str | None = None
    embedding: str | None = None
    block_size: int | None = None
    activations: str | None = None
    symmetric: bool = True
    exact: bool = True


def resolve(
    options: PrecisionOptions, *, tied: bool, quantizer: Quantizer = round_to_nearest
) -> tuple[Plan, PrecisionInfo]:
    """The plan, and what a manifest says of it.

    lm_head and embedding have 8 bits where the layers have 4 or 8: a token is decided in the one, and the other is
    read a row at a time. Where the layers are in formats of GPUs a table of the embedding stays in half precision,
    because rows of codes cannot be gathered there.

    Args:
        tied: the embedding is the lm_head too.

    Raises:
        UsageError: options that contradict each other.
    """
    weights = options.precision
    activations = options.activations or ("fp16" if weights in GPU_FORMATS else "fp32")
    if weights == "fp32" and activations != "fp32":
        raise UsageError(
            f"--activations {activations} with --precision fp32: weights wider than what they are multiplied with "
            f"gain nothing; ask for --precision {activations}"
        )
    if options.block_size is not None and weights not in ("int8", "int4"):
        raise UsageError(f"--block-size {options.block_size}: {weights} has no block size to choose; int8 and int4 do")
    if not options.symmetric and weights not in ("int8", "int4"):
        raise UsageError(f"--asymmetric: {weights} has no zero points; int8 and int4 do")
    narrow = {"int4": "int8", "nvfp4": "fp8"}.get(weights, weights)
    lookup = "fp16" if narrow == "fp8" else narrow
    lm_head = options.lm_head or (options.embedding or lookup if tied else narrow)
    embedding = options.embedding or (lm_head if tied else lookup)
    if tied and embedding != lm_head:
        raise UsageError(
            f"--embedding {embedding} with --lm-head {lm_head}: this model has one table for both; give one format"
        )

    def form(kind: str) -> Format:
        if kind in FLOATS:
            return Format(kind)
        block = BLOCKS[kind]
        if options.block_size is not None and kind == weights:
            block = options.block_size
        return Format(kind, block, options.symmetric or kind not in ("int8", "int4"))

    plan = Plan(form(weights), form(lm_head), form(embedding), quantizer)
    info = PrecisionInfo(
        weights=weights,
        lm_head=lm_head,
        embedding=embedding,
        block=plan.weights.block,
        activations=activations,
        exact=options.exact,
    )
    return plan, info
