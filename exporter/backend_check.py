"""``verify --backend``: an engine's outputs beside those of the exported graph on ONNX Runtime's CPU provider.

Both are given the same calls: chunks, trees and commits, one after another, so that an error shows in the call that
makes it. The reference runs the graph as written, without fusions. With ``layers`` one chunk is run with every tensor
that both graphs name marked as an output, and the first in graph order that is off is reported. Marking keeps a backend
from fusing across a tensor, so what only a fusion gets wrong shows in the outputs alone.

Polygraphy's comparator is not used here: its runners get whole inputs anew for each iteration, whereas an engine keeps
its caches between calls, pads widths and may have no caches as inputs at all (OpenVINO, the CPU's lowering). For the
layers of a TensorRT engine it does serve, on the exported file: ``polygraphy run target.onnx --trt --onnxrt
--trt-outputs mark all --onnx-outputs mark all``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.engines.ort import OrtEngine
from specexport.engines.ort_providers import PROVIDERS
from specexport.engines.tensorrt_module import BACKENDS
from specexport.exporter.parity import Deviation
from specexport.exporter.progress import Progress
from specexport.exporter.verify import limit_of
from specexport.runtime import contract
from specexport.runtime.bundle import Bundle
from specexport.runtime.cache import CacheRows
from specexport.runtime.engine import Step, TargetEngine, find_engine, widest_of
from specexport.runtime.errors import UsageError
from specexport.runtime.tree import Tree

#: Nodes of the chunk whose layers are compared; even, so that no engine adds a row.
LAYER_NODES = 8


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared, and how far off it was.

    Attributes:
        limit: largest error that passes, relative to the largest value of the reference (or 1).
        outputs: by name: logits, features, caches. layers: by tensor, in graph order; empty unless asked for.
        operators: what makes each of them.
    """

    bundle: Path
    backend: str
    limit: float
    outputs: dict[str, Deviation]
    layers: dict[str, Deviation] = field(default_factory=dict)
    operators: dict[str, str] = field(default_factory=dict)

    @property
    def first(self) -> str | None:
        """The first tensor in graph order that is off."""
        return next((name for name, found in self.layers.items() if not found.relative <= self.limit), None)

    @property
    def passed(self) -> bool:
        return self.first is None and all(found.relative <= self.limit for found in self.outputs.values())

    def to_dict(self) -> dict[str, Any]:
        """Stable JSON; an error that is no number is null."""
        layers = None
        if self.layers:
            worst = max(self.layers, key=lambda name: self.layers[name].relative)
            layers = {
                "compared": len(self.layers),
                "first": None if self.first is None else self._layer(self.first),
                "worst": self._layer(worst),
            }
        return {
            "passed": self.passed,
            "bundle": str(self.bundle),
            "backend": self.backend,
            "limit": self.limit,
            "outputs": {name: _plain(found) for name, found in self.outputs.items()},
            "layers": layers,
        }

    def _layer(self, name: str) -> dict[str, Any]:
        return {"tensor": name, "operator": self.operators[name]} | _plain(self.layers[name])


def _plain(found: Deviation) -> dict[str, Any]:
    error = found.error if math.isfinite(found.error) else None
    return {"error": error, "size": found.size, "where": found.where}


def _check_visible(backend: str) -> None:
    """Refuse to look inside what has no inside, before anything runs."""
    if backend in BACKENDS:
        raise UsageError(
            f"--layers: a plan of {backend} gives no tensors but its outputs: leave --layers out, or name --backend "
            f"onnxruntime-{backend}, where TensorRT compiles the graph with its tensors as outputs"
        )
    if backend not in PROVIDERS and not backend.startswith("openvino"):
        raise UsageError(f"--layers: expected one of {', '.join(PROVIDERS)} or an OpenVINO engine, got {backend}")


def compare(bundle: Path, backend: str, *, threads: int = 0, layers: bool = False, progress: Progress) -> Comparison:
    """Run the engine called ``backend`` beside the reference.

    Raises:
        BundleError: the bundle cannot be loaded, or the reference cannot run it (bf16, formats for GPUs).
        UsageError: an unknown engine, one that is not installed, or one whose layers cannot be seen.
    """
    if layers:
        _check_visible(backend)
    opened = Bundle.load(bundle)
    target = opened.manifest.target
    with progress.stage(f"outputs of {backend}"):
        reference = OrtEngine(opened.path, threads=threads, lowered=False, optimize=False)
        outputs = _compare_calls(reference, find_engine(backend)(opened.path, threads=threads), target.valid_vocab)
    found = Comparison(opened.path, backend, limit_of(target), outputs)
    if layers:
        del reference
        with progress.stage(f"layers of {backend}"):
            return _compare_layers(opened, found, threads)
    return found


def _calls(engine: TargetEngine, vocab: int) -> Iterator[tuple[CacheRows, Tree, list[int]]]:
    """(rows before it, tree, rows of logits) of each call: chunks, chains and trees, with and without a commit."""
    rng, rows, widest = np.random.default_rng(0), CacheRows(), widest_of(engine)

    def chain(count: int) -> Tree:
        return Tree.chain([int(token) for token in rng.integers(0, vocab, count)])

    def fork(count: int) -> Tree:
        parents = np.array([-1] + [int(rng.integers(0, node)) for node in range(1, count)])
        return Tree(rng.integers(0, vocab, count), parents)

    for count in (7, 1, 4):
        yield rows, chain(count), [count - 1]
        rows = rows.accept(range(count))
    for kind in ("fork", "fork", "root", "chain", "fork", "root"):
        size = min(6, widest(rows.past))
        tree = chain(size) if kind == "chain" else fork(size)
        yield rows, tree, list(range(size))
        path = [0] if kind == "root" else tree.path(size - 1)
        rows = rows.accept(path)


def _compare_calls(reference: TargetEngine, engine: TargetEngine, vocab: int) -> dict[str, Deviation]:
    names = [contract.LOGITS, *([contract.FEATURES] if reference.features_size else []), "caches"]
    found = {name: Deviation() for name in names}
    for number, (rows, tree, select) in enumerate(_calls(engine, vocab)):
        where = f"call {number}: {len(tree)} nodes after {rows.past} tokens, {len(rows.commit)} moved"
        results = []
        for one in (engine, reference):
            logits = one.run(Step.of(tree, rows, select))
            features = one.features().copy() if reference.features_size else None
            results.append((logits.copy(), features))
        (logits, features), (right, right_features) = results
        found[contract.LOGITS].note(logits, right, where)
        if features is not None and right_features is not None:
            found[contract.FEATURES].note(features, right_features, where)
        last = rows
    for index, (mine, other) in enumerate(
        zip(engine.read_cache(last.past), reference.read_cache(last.past), strict=True)
    ):
        found["caches"].note(mine, other, f"{'kv'[index % 2]} of layer {index // 2}")
    return found


def _compare_layers(bundle: Bundle, found: Comparison, threads: int) -> Comparison:
    from specexport.exporter.marked import marked  # reads the graphs with onnx

    tokens = np.random.default_rng(0).integers(0, bundle.manifest.target.valid_vocab, LAYER_NODES)
    index = np.arange(LAYER_NODES)
    inputs: dict[str, NDArray[Any]] = {
        contract.TOKENS: tokens[None],
        contract.POSITIONS: index[None],
        contract.TREE: np.tri(LAYER_NODES, dtype=bool)[None],
        contract.PAST: np.zeros(1, np.int64),
        contract.WRITE: np.zeros(1, np.int64),
        contract.COMMIT: np.zeros(0, np.int64),
        contract.ORDER: index,
        contract.SELECT: index,
    }
    operators, expected, seen = marked(bundle.path, found.backend, inputs, threads)
    layers: dict[str, Deviation] = {}
    for name in operators:
        if _comparable(expected.get(name), seen.get(name)):
            layers[name] = deviation = Deviation()
            deviation.note(seen[name], expected[name], str(list(expected[name].shape)))
    return Comparison(found.bundle, found.backend, found.limit, found.outputs, layers, operators)


def _comparable(one: NDArray[Any] | None, other: NDArray[Any] | None) -> bool:
    """Both are numbers of one shape: masks are as wide as a backend pleases, and codes are no results."""
    return (
        one is not None and other is not None and one.shape == other.shape and one.size > 0
        and one.dtype.kind == "f" == other.dtype.kind and bool(np.isfinite(one).all())
    )  # fmt: skip
