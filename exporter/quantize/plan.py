"""Which matrix is stored how: formats, and a plan that gives one to every parameter of a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specexport.exporter.quantize.record import Quantized
from specexport.runtime.errors import CheckpointError

#: Formats in which numbers are stored as they are, and their dtypes.
FLOATS: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: Formats of codes with scales.
CODES = ("int8", "int4", "fp8", "nvfp4")

#: NVFP4 is defined with this many elements a scale.
NVFP4_BLOCK = 16
#: Smallest block that ONNX Runtime's MatMulNBits takes.
MIN_BLOCK = 16


def narrow(name: str, tensor: Tensor, dtype: torch.dtype, fix: str = "build with --activations bf16 or fp32") -> Tensor:
    """A tensor in ``dtype``.

    Args:
        fix: what whoever reads the error may do.

    Raises:
        CheckpointError: a value is no number, or larger than those of float16.
    """
    result = tensor.to(dtype)
    if dtype == torch.float16 and not (finite := torch.isfinite(result)).all():
        worst = float(tensor[~finite].flatten()[0])
        raise CheckpointError(f"{name} holds {worst:g}, fp16 ends at {torch.finfo(dtype).max:g}: {fix}")
    return result


@dataclass(frozen=True, slots=True)
class Format:
    """How a matrix is stored.

    Attributes:
        kind: of :data:`FLOATS` or :data:`CODES`.
        block: inputs that share a scale (0: all of a row); no meaning for floats.
        symmetric: codes have no zero point (int4 and int8 only).
    """

    kind: str
    block: int = 0
    symmetric: bool = True

    @property
    def quantized(self) -> bool:
        return self.kind in CODES

    def fitted(self, width: int) -> Format:
        """This format for rows of ``width`` inputs.

        A block that does not divide the width is halved until it does, down to :data:`MIN_BLOCK` (then the last block
        of a row is short): TensorRT takes whole blocks only, and short ones waste codes everywhere.
        """
        if not self.quantized or not self.block or self.kind == "nvfp4":
            return self
        block = self.block
        while width % block and block > MIN_BLOCK:
            block //= 2
        return replace(self, block=min(block if width % block == 0 else self.block, width))


#: Makes the codes of a parameter (its name in the graph's state) from its values [out, in], in the format given, which
#: is already fitted to the width. ``exporter.quantize.rtn.quantizer`` is the one without data; calibrated methods make
#: theirs in advance and look them up here.
Quantizer = Callable[[str, Tensor, Format], Quantized]


@dataclass(frozen=True, slots=True)
class Plan:
    """Formats of a graph's matrices; vectors and tables of the rotation follow the activations instead.

    Attributes:
        weights: projections of the layers. lm_head: also of a table that is lm_head and embedding at once.
        embedding: of a table that is no lm_head.
        quantizer: makes codes where a format has them.
        keep: matrices that the checkpoint has quantised keep their codes, where the format is of their kind.
    """

    weights: Format
    lm_head: Format
    embedding: Format
    quantizer: Quantizer
    keep: bool = True

    def format_of(self, parameter: str, tied: bool = False) -> Format:
        """The format of a matrix by its name in the state; ``tied``: the embedding is the lm_head too."""
        last = parameter.rsplit(".", 1)[-1]
        if last == "lm_head" or (last == "embedding" and tied):
            return self.lm_head
        return self.embedding if last == "embedding" else self.weights

    def keeps(self, parameter: str, stored: Quantized, tied: bool = False) -> bool:
        """Whether codes of a checkpoint stay as they are: of the kind asked for, and of no more bits."""
        form = self.format_of(parameter, tied)
        float8 = stored.codes.dtype == torch.float8_e4m3fn
        wanted = {"int4": 4, "int8": 8, "fp8": 8}.get(form.kind, 0)
        return self.keep and stored.bits <= wanted and float8 == (form.kind == "fp8")
