"""Checkpoints that are quantised already: matrices made of several stored tensors, behind their plain names.

A format's reader (one file each beside this one) says which stored tensors make which matrix, checked by their headers;
the codes are decoded when a matrix is read, never rounded again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass

from torch import Tensor

from specexport.exporter.quantize.record import Quantized
from specexport.exporter.shards import StoredWeights
from specexport.runtime.errors import CheckpointError

#: Stored dtype of a quantised matrix, as :meth:`QuantizedWeights.stored` gives it.
QUANTIZED = "quantized"
#: Dtypes of scales and of what is not quantised.
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
SCALES = frozenset({"F32", "F16", "BF16"})

#: What AutoRound adds to the configs of the formats it exports to: how it searched, nothing of the values.
AUTOROUND = """
    autoround_version iters nsamples seqlen lr minmax_lr amp low_gpu_mem_usage enable_quanted_input enable_minmax_tuning
    gradient_accumulate_steps train_bs scale_dtype to_quant_block_names
""".split()  # noqa: SIM905 - a word list

#: Projections of a layer, which every format quantises unless told otherwise.
_PROJECTION = re.compile(r"(model\.)?(layers\.\d+|midlayer)\.(self_attn|mlp)\.\w+_proj")
_LM_HEAD = re.compile(r"(model\.)?lm_head")


@dataclass(frozen=True, slots=True)
class Packed:
    """A quantised matrix of shape [out, in]: the stored tensors it is made of, and what decodes them."""

    shape: tuple[int, int]
    parts: tuple[str, ...]
    load: Callable[[], Quantized]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a format's reader makes of a checkpoint.

    Attributes:
        words: the quantisation in words.
        matrices: by module (``model.layers.0.mlp.up_proj``).
        notes: what a user should know, one line each.
    """

    words: str
    matrices: Mapping[str, Packed]
    notes: tuple[str, ...] = ()


class Modules:
    """The stored tensors by the module they belong to."""

    def __init__(self, weights: StoredWeights) -> None:
        self.weights = weights
        self.leaves: dict[str, set[str]] = {}
        for name in weights.names():
            module, _, leaf = name.rpartition(".")
            self.leaves.setdefault(module, set()).add(leaf)

    def holding(self, kinds: Set[str]) -> list[str]:
        """Modules that have a tensor of one of these kinds."""
        return sorted(module for module, leaves in self.leaves.items() if leaves & kinds)

    def parts(self, module: str, needed: Set[str], optional: Set[str] = frozenset()) -> tuple[str, ...]:
        """Names of a module's tensors that make its matrix; a bias is not one.

        Raises:
            CheckpointError: one is missing, or there is one of another kind.
        """
        leaves = self.leaves[module] - {"bias"}
        if missing := sorted(needed - leaves):
            has = ", ".join(sorted(leaves))
            raise CheckpointError(f"{module} has {has} but no {missing[0]}; download the checkpoint again")
        if unknown := sorted(leaves - needed - optional):
            raise CheckpointError(f"tensor {f'{module}.{unknown[0]}'!r} is not understood beside {min(needed)}")
        return tuple(f"{module}.{leaf}" for leaf in sorted(leaves))

    def dtype(self, name: str) -> str:
        return self.weights.stored(name)[0]

    def shape(self, name: str, rank: int = 2) -> tuple[int, ...]:
        """The shape of a tensor that must have ``rank`` dimensions, none of them empty."""
        shape = self.weights.shape(name)
        if len(shape) != rank or not all(shape):
            raise CheckpointError(f"tensor {name!r} has shape {list(shape)}; expected {rank} dimensions, none empty")
        return shape

    def check(self, name: str, dtypes: Set[str], *shapes: tuple[int, ...]) -> None:
        """Raise CheckpointError unless a tensor has one of these dtypes and, if any are given, shapes."""
        shape, dtype = self.weights.shape(name), self.dtype(name)
        if shapes and shape not in shapes:
            wanted = " or ".join(str(list(one)) for one in dict.fromkeys(shapes))
            raise CheckpointError(f"tensor {name!r} has shape {list(shape)}; the quantisation calls for {wanted}")
        if dtype not in dtypes:
            raise CheckpointError(f"tensor {name!r} is stored as {dtype}; expected {' or '.join(sorted(dtypes))}")

    def read(self, name: str) -> Tensor:
        return self.weights.read(name)


#: Whether a config has a module quantised; None: it may be either.
Expected = Callable[[str], bool | None]


def by_default(module: str) -> bool | None:
    """Projections are quantised, anything else may be."""
    return True if _PROJECTION.fullmatch(module) else None


def is_linear(module: str) -> bool:
    """Whether a module is one that a rule for all linear layers means."""
    return _PROJECTION.fullmatch(module) is not None or _LM_HEAD.fullmatch(module) is not None


def excluded(module: str, entries: tuple[str, ...]) -> bool | None:
    """Whether an ignore list of plain names excludes a module; None where readers of such lists disagree (some take an
    entry as any part of a name, others as whole components of it)."""
    dotted = f".{module}."
    if any(f".{entry}." in dotted for entry in entries):
        return True
    return None if any(entry in module for entry in entries) else False


def check_coverage(modules: Modules, quantised: Set[str], expected: Expected) -> None:
    """Compare what is quantised with what the config says is.

    Raises:
        CheckpointError: no matrix is quantised, one is that the config excludes, or a projection is plain that it does
            not exclude.
    """
    if not quantised:
        raise CheckpointError(
            "config: quantization_config says that the checkpoint is quantised, but no tensor is; remove it if so"
        )
    for module in sorted(modules.leaves):
        want = expected(module)
        if module in quantised and want is False:
            raise CheckpointError(f"{module} is quantised although quantization_config excludes it")
        plain = "weight" in modules.leaves[module] and module not in quantised
        if plain and want and is_linear(module):
            raise CheckpointError(
                f"tensor {f'{module}.weight'!r} is not quantised although quantization_config does not exclude it; "
                "add it to the list of modules that are not if that is right"
            )


class QuantizedWeights:
    """A checkpoint under its plain names; a ``StoredWeights`` and a ``QuantizedSource``.

    Raises:
        CheckpointError: tensors that belong to no matrix, or both a packed and a plain matrix of one name.
    """

    def __init__(self, inner: StoredWeights, reading: Reading) -> None:
        self._inner = inner
        self._matrices = {f"{module}.weight": packed for module, packed in reading.matrices.items()}
        used = {part for packed in reading.matrices.values() for part in packed.parts}
        self._plain = [name for name in inner.names() if name not in used]
        if twice := sorted(self._matrices.keys() & set(self._plain)):
            raise CheckpointError(f"tensor {twice[0]!r} is there as it is and quantised too")
        check_plain(inner, self._plain)

    def names(self) -> list[str]:
        return [*self._matrices, *self._plain]

    def shape(self, name: str) -> tuple[int, ...]:
        packed = self._matrices.get(name)
        return self._inner.shape(name) if packed is None else packed.shape

    def read(self, name: str) -> Tensor:
        found = self.quantized(name)
        return self._inner.read(name) if found is None else found.dequantize()

    def quantized(self, name: str) -> Quantized | None:
        packed = self._matrices.get(name)
        return None if packed is None else packed.load()

    def stored(self, name: str) -> tuple[str, Iterator[memoryview]]:
        """As of any source; the bytes of a quantised matrix are a description of its parts, and those of each."""
        packed = self._matrices.get(name)
        return self._inner.stored(name) if packed is None else (QUANTIZED, self._pieces(packed))

    def headers(self) -> Iterator[bytes]:
        yield from self._inner.headers()

    def _pieces(self, packed: Packed) -> Iterator[memoryview]:
        stored = [(part, *self._inner.stored(part)) for part in packed.parts]
        described = [(part, dtype, self._inner.shape(part)) for part, dtype, _ in stored]
        yield memoryview(json.dumps(described).encode())
        for _, _, pieces in stored:
            yield from pieces


#: Tensors that only quantised checkpoints have.
PACKED_KINDS = frozenset(
    {
        *("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv"),
        *(
            "weight_zero_point",
            "weight_shape",
            "weight_g_idx",
            "weight_global_scale",
            "input_scale",
            "input_zero_point",
        ),
        *("output_scale", "activation_scale", "input_global_scale", "weight_scale_2", "SCB", "weight_format"),
        *("W_q", "absmax", "quant_map"),
    }
)


def is_packed(weights: StoredWeights) -> bool:
    """Whether any tensor looks quantised."""
    try:
        check_plain(weights, list(weights.names()))
    except CheckpointError:
        return True
    return False


def check_plain(weights: StoredWeights, names: list[str]) -> None:
    """Raise CheckpointError for a tensor that is part of a quantised matrix which nothing was made of."""
    for name in names:
        leaf = name.rpartition(".")[2]
        if leaf in PACKED_KINDS:
            raise CheckpointError(
                f"tensor {name!r} is part of a quantised matrix, but the config says of no quantisation that has it"
            )
        if leaf in ("weight", "bias") and (dtype := weights.stored(name)[0]) not in FLOATS:
            raise CheckpointError(
                f"tensor {name!r} is stored as {dtype}, so quantised, but the config does not say how"
            )
