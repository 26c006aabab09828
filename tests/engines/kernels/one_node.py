"""Graphs of one node of our own operators, on onnxruntime's CPU provider, and a digest of their results."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from specexport.engines.kernels.library import kernels_library

Floats = NDArray[np.float32]
DOMAIN = "specexport"
needs_kernels = pytest.mark.skipif(kernels_library() is None, reason="the CPU kernels are not installed")
#: Every instruction set there is, by the names of ``SPECEXPORT_KERNELS_ISA``.
ISAS = ("generic", "avx2", "avx512", "neon")
_KINDS = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.uint8): TensorProto.UINT8}
_KINDS |= {np.dtype(np.int64): TensorProto.INT64, np.dtype(np.bool_): TensorProto.BOOL}
_KINDS |= {np.dtype(np.int8): TensorProto.INT8}


def session(
    operator: str,
    inputs: Mapping[str, NDArray[Any] | None],
    outputs: Sequence[str],
    attributes: Mapping[str, int | float],
    constants: Mapping[str, NDArray[Any]] | None = None,
    threads: int = 1,
    integers: Sequence[str] = (),
) -> ort.InferenceSession:
    """A graph of one node.

    Args:
        inputs: in the operator's order, None for one that is left out; only type and rank of the arrays count.
        outputs: names, "" for one that is left out; ``integers`` are those of int64.
        constants: those of the inputs that are initializers.
    """
    constants = constants or {}
    given = {name: array for name, array in inputs.items() if array is not None and name not in constants}
    names = [name if name in given or name in constants else "" for name in inputs]
    node = helper.make_node(operator, names, list(outputs), domain=DOMAIN, **dict[str, Any](attributes))
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(name, _KINDS[x.dtype], [None] * x.ndim) for name, x in given.items()],
        [
            helper.make_tensor_value_info(name, TensorProto.INT64 if name in integers else TensorProto.FLOAT, None)
            for name in outputs
            if name
        ],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.enable_cpu_mem_arena = False  # so that a sanitizer sees where a tensor ends
    options.register_custom_ops_library(str(kernels_library()))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@dataclass(frozen=True)
class Product:
    """A random matrix, [outputs, width], and its operator.

    Attributes:
        zeros: each block has a zero point of its own; else they are the middle. row_scales: a row has one scale.
        extreme: codes are the lowest and the highest there are.
    """

    outputs: int
    width: int
    block: int = 32
    bits: int = 8
    gate: int = 0
    zeros: bool = False
    row_scales: bool = False
    norm: bool = False
    skip: bool = False
    total: bool = False
    extreme: bool = False
    threads: int = 1
    seed: int = 0
    epsilon: float = 1e-5

    @property
    def blocks(self) -> int:
        return -(-self.width // self.block)

    @cached_property
    def _parts(self) -> tuple[NDArray[np.int64], Floats, NDArray[np.int64]]:
        """Codes [N, K], scales [N, blocks], zero points [N, blocks]."""
        rng, top = np.random.default_rng(self.seed), 1 << self.bits
        codes = rng.integers(0, top, (self.outputs, self.width))
        if self.extreme:
            codes = rng.integers(0, 2, codes.shape) * (top - 1)
        scales = rng.uniform(0.5, 1.5, (self.outputs, 1 if self.row_scales else self.blocks)) / top
        zeros = np.full((self.outputs, self.blocks), top // 2)
        if self.zeros:
            zeros = rng.integers(0, top, zeros.shape)
        return codes, np.broadcast_to(scales, zeros.shape).astype(np.float32), zeros

    @cached_property
    def gamma(self) -> Floats:
        return np.random.default_rng(self.seed + 1).uniform(0.5, 1.5, self.width).astype(np.float32)

    @property
    def weights(self) -> tuple[NDArray[np.int64], Floats]:
        """Codes minus their zero points [N, K], scales [N, blocks]."""
        codes, scales, zeros = self._parts
        return codes - np.repeat(zeros, self.block, axis=1)[:, : self.width], scales

    @property
    def stored(self) -> dict[str, NDArray[Any]]:
        """The constants, as ``MatMulNBits`` has them."""
        codes, scales, zeros = self._parts
        short = self.blocks * self.block - self.width
        padded: NDArray[Any] = np.pad(codes, ((0, 0), (0, short)), constant_values=1 << self.bits - 1).astype(np.uint8)
        points: NDArray[Any] = zeros.astype(np.uint8)
        if self.bits == 4:
            padded = padded[:, ::2] | padded[:, 1::2] << 4
            points = np.pad(points, ((0, 0), (0, self.blocks % 2)))
            points = points[:, ::2] | points[:, 1::2] << 4
        found: dict[str, NDArray[Any]] = {
            "codes": padded.reshape(self.outputs, self.blocks, self.block * self.bits // 8),
            "scales": scales.reshape(-1),
        }
        return found | ({"zeros": points.reshape(-1)} if self.zeros else {})

    @property
    def attributes(self) -> dict[str, int | float]:
        sizes = {"N": self.outputs, "K": self.width, "bits": self.bits, "block_size": self.block, "gate": self.gate}
        return {**sizes, "epsilon": self.epsilon}

    @cached_property
    def _session(self) -> ort.InferenceSession:
        row = np.zeros((1, 1, self.width), np.float32)
        constants = self.stored | ({"gamma": self.gamma} if self.norm else {})
        inputs = {"x": row, "codes": None, "scales": None, "zeros": None, "gamma": None, "skip": None}
        inputs["skip"] = row if self.skip else None
        outputs = ["y", "sum"] if self.total else ["y"]
        return session("QuantizedProduct", inputs, outputs, self.attributes, constants, self.threads)

    def rows(self, count: int, seed: int = 7) -> Floats:
        """Random activations, [1, count, K]; their magnitudes differ."""
        rng = np.random.default_rng(seed)
        scale = 2.0 ** rng.integers(-3, 4, (1, count, 1))
        return (rng.standard_normal((1, count, self.width)) * scale).astype(np.float32)

    def run(self, x: Floats, skip: Floats | None = None) -> list[Floats]:
        """``y``, and ``sum`` if it is asked for."""
        feeds = {"x": x} if skip is None else {"x": x, "skip": skip}
        found: list[Floats] = self._session.run(None, feeds)
        return found


@dataclass
class Attention:
    """An attention operator; calls are made by :meth:`run`.

    Attributes:
        pairs: R, rotated pairs of a head; None for no rotation.
        treeless: calls give no tree, and are chains.
    """

    heads: int = 4
    kv_heads: int = 2
    width: int = 64
    slots: int = 96
    pairs: int | None = 32
    window: int = 0
    packed: bool = True
    norms: bool = False
    treeless: bool = False
    threads: int = 1
    epsilon: float = 1e-6
    positions: int = 4096
    constants: dict[str, Floats] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.width)
        self.constants = {}
        if self.pairs is not None:
            turns = np.arange(self.positions)[:, None] / 10.0 ** np.linspace(0, 3, self.pairs)
            self.constants |= {"cos": np.cos(turns).astype(np.float32), "sin": np.sin(turns).astype(np.float32)}
        if self.norms:
            for name in ("query_norm", "key_norm"):
                self.constants[name] = rng.uniform(0.5, 1.5, self.width).astype(np.float32)

    @property
    def scale(self) -> float:
        return float(np.float32(self.width**-0.5))

    def caches(self, past: int, seed: int = 3) -> tuple[Floats, Floats]:
        """Random committed rows; what lies behind them must not matter: NaN."""
        rng = np.random.default_rng(seed)
        found = rng.standard_normal((2, 1, self.kv_heads, self.slots, self.width)).astype(np.float32)
        found[..., past:, :] = np.nan
        return found[0], found[1]

    def states(self, nodes: int, seed: int = 5) -> Floats:
        """Query, key and value of so many nodes, [nodes, Hq + 2 Hkv, D]."""
        shape = (nodes, self.heads + 2 * self.kv_heads, self.width)
        return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)

    def parts(self, states: Floats) -> list[Floats]:
        return np.split(states, [self.heads, self.heads + self.kv_heads], axis=1)

    def feeds(
        self, states: Floats, tree: NDArray[np.bool_], past: int, caches: Sequence[Floats]
    ) -> dict[str, NDArray[Any]]:
        count = len(states)
        parts = [states] if self.packed else self.parts(states)
        rows = [part.reshape(1, count, part.shape[1] * part.shape[2]) for part in parts]
        positions = past + tree.sum(axis=1) - 1
        return {
            **dict(zip(("query", "key", "value"), rows, strict=False)),
            "past_k": caches[0],
            "past_v": caches[1],
            "positions": positions[None].astype(np.int64),
            "past": np.array([past], np.int64),
            **({} if self.treeless else {"tree": tree[None]}),
        }

    @cached_property
    def session(self) -> ort.InferenceSession:
        feeds = self.feeds(self.states(1), np.ones((1, 1), bool), 0, self.caches(0))
        order = ("query", "key", "value", "past_k", "past_v", "cos", "sin", "positions", "past", "tree")
        inputs = {name: feeds.get(name) for name in (*order, "query_norm", "key_norm")}
        attributes = {"num_heads": self.heads, "kv_num_heads": self.kv_heads, "window": self.window}
        attributes |= {"scale": self.scale, "epsilon": self.epsilon}  # type: ignore[dict-item]
        outputs = ("y", "present_k", "present_v")
        return session("TreeAttention", inputs, outputs, attributes, self.constants, self.threads)

    def run(self, states: Floats, tree: NDArray[np.bool_], past: int, caches: Sequence[Floats]) -> list[Floats]:
        """Output [nodes, Hq D] and both caches after the call, which the given ones are not."""
        y, *presents = self.session.run(None, self.feeds(states, tree, past, caches))
        return [y[0], *presents]


def random_tree(rng: np.random.Generator, nodes: int, chain: int = 1) -> NDArray[np.bool_]:
    """A tree whose first ``chain`` nodes follow each other."""
    tree = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        tree[node] |= tree[node - 1 if node < chain else int(rng.integers(0, node))]
    return tree


def digest() -> str:
    """Of the very bits of products and attention in many shapes."""
    seen = hashlib.sha256()

    def add(arrays: Sequence[NDArray[Any]]) -> None:
        for array in arrays:
            seen.update(np.ascontiguousarray(array).tobytes())

    for seed, (bits, block, zeros, row_scales) in enumerate(
        (bits, block, zeros, row_scales)
        for bits in (8, 4)
        for block in (16, 32, 64, 128)
        for zeros in (False, True)
        for row_scales in (False, True)
    ):
        gate = seed % 3
        outputs = 96 if gate else 83
        product = Product(outputs, 200, block, bits, gate, zeros, row_scales, norm=seed % 2 == 0, seed=seed)
        for count in (1, 2, 3, 4, 6, 7):
            add(product.run(product.rows(count)))
    for extreme in (Product(40, 256, 256, 8, extreme=True), Product(40, 256, 256, 4, extreme=True, zeros=True)):
        add(extreme.run(np.sign(extreme.rows(5))))
    tiny = Product(16, 64)
    add(tiny.run(tiny.rows(3) * np.float32(1e-36)))
    add(tiny.run(tiny.rows(3) * np.float32(1e-43)))
    add(tiny.run(tiny.rows(3) * np.float32(1e30)))
    rng = np.random.default_rng(11)
    for width, pairs in ((8, 4), (40, 20), (64, 32), (80, 16), (96, None), (128, 64), (256, 128)):
        for window in (0, 9):
            attention = Attention(4, 1 if width > 64 else 2, width, 80, pairs, window, norms=width % 3 == 0)
            for nodes, past, chain in ((1, 40, 1), (13, 20, 4), (30, 0, 30), (17, 63, 2)):
                # No NaN behind the committed rows: their payload is the processor's own.
                caches = [np.nan_to_num(cache) for cache in attention.caches(past)]
                states = attention.states(nodes) * np.float32(3)
                add(attention.run(states, random_tree(rng, nodes, chain), past, caches))
    return seen.hexdigest()


def isa() -> str:
    """The instruction set that the library chose."""
    name = ctypes.CDLL(str(kernels_library())).specexport_kernels_isa
    name.restype = ctypes.c_char_p
    return str(name().decode())
