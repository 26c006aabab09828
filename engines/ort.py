"""ONNX Runtime: the embedded default on CPUs, and other providers (``engines.ort_providers``) by the same code.

Caches live in buffers of ours that are bound once as both past and present, so a step moves no cache. On the CPU the
bundle carries a lowered graph (``exporter.passes.grouped_query``) whose step cost follows the used rows, and a small
commit graph for the steps in which accepted rows have to move. Of quantised targets there is one more, for our own
kernels (``engines.kernels``), which runs where they are installed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from specexport.engines.kernels.library import kernels_library
from specexport.engines.ort_providers import CPU, CUDA, TENSORRT, TENSORRT_RTX, Provider
from specexport.engines.ort_session import (
    KERNELS_SUFFIX,
    Caches,
    OrtGraph,
    call,
    check_target,
    load,
    open_graph,
    session_options,
    uses_kernels,
)
from specexport.runtime import contract
from specexport.runtime.engine import Step
from specexport.runtime.errors import UsageError
from specexport.runtime.machine import physical_cores as physical_cores
from specexport.runtime.manifest import GPU_FORMATS, MANIFEST_NAME, Manifest

TARGET_FILE = "target.onnx"
#: The graphs lowered for the CPU lie beside the target because they share its data file.
CPU_TARGET_FILE = "target.cpu.onnx"
CPU_COMMIT_FILE = "commit.cpu.onnx"
#: A second target of a bundle, the draft model.
DRAFT_FILE = "draft.onnx"
#: Step inputs of the lowered target; the others belong to the commit graph.
LOWERED_INPUTS = (contract.TOKENS, contract.POSITIONS, contract.TREE, contract.PAST, contract.SELECT)
#: Cache rows of the lowered graphs that hold no tokens (``exporter.passes.grouped_query`` says why).
CPU_SPARE_ROWS = 1

#: Operator of our own that grows a drafter's tree (``exporter.passes.grow_tree``).
GROW_TREE = "GrowTree"

#: Metadata key of a lowered target that sees itself to the rows of an odd call (``exporter.lower``).
CPU_ANY_ROWS = "specexport.any_rows"

#: ONNX Runtime's matrix product adds up rows of more values than this in two parts where it makes more than
#: :data:`NARROW_COLUMNS` columns, else in one: a score of attention then depends on how many rows the cache has after
#: the call. Rows on either side of that border must not share a call, or the last bit of some depends on the drafts.
WIDE_HEAD, NARROW_COLUMNS = 128, 64

#: Call shapes whose buffers stay bound; the least recently used is dropped.
MAX_PLANS = 64


def cpu_files(graph: str) -> tuple[str, str]:
    """Names of the lowering of a target graph for the CPU and of its commit graph, beside ``graph``."""
    if graph == TARGET_FILE:
        return CPU_TARGET_FILE, CPU_COMMIT_FILE
    stem = graph.removesuffix(".onnx")
    return f"{stem}.cpu.onnx", f"{stem}.commit.cpu.onnx"


def kernels_file(graph: str) -> str:
    """Name of the lowering of a graph for our own kernels, beside ``graph``; it shares the CPU lowering's data."""
    return graph.removesuffix(".onnx") + KERNELS_SUFFIX


def cpu_graph(folder: Path, graph: str) -> Path | None:
    """The lowering of ``folder/graph`` that this machine's CPU runs, None where there is none."""
    names = [cpu_files(graph)[0]] if kernels_library() is None else [kernels_file(graph), cpu_files(graph)[0]]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def runs_kernels(folder: Path, graph: str) -> bool:
    """Whether this machine's CPU runs ``folder/graph`` on our own kernels."""
    path = cpu_graph(folder, graph)
    return path is not None and uses_kernels(path)


def grows_trees(folder: Path, graph: str) -> bool:
    """Whether this machine's CPU grows the tree of a drafter's graph in one operator, our own."""
    path = cpu_graph(folder, graph)
    return path is not None and uses_kernels(path) and GROW_TREE.encode() in path.read_bytes()


class _Plan:
    """Input and output buffers of one call shape (T nodes, R rows of logits, A moved rows), bound once.

    ``logits`` and ``features`` have as many rows as the engine computes, which may be one more than asked for.
    """

    def __init__(self, engine: OrtEngine, nodes: int, rows: int, accepted: int) -> None:
        self.binding = engine._session.io_binding()
        engine._caches.bind(self.binding)
        computed, rows = engine._computed(nodes), engine._computed(rows)
        self.buffers: dict[str, NDArray[Any]] = {
            contract.TOKENS: np.zeros((1, computed), np.int64),
            contract.POSITIONS: np.zeros((1, computed), np.int64),
            contract.TREE: np.zeros((1, computed, computed), np.bool_),
            contract.PAST: np.zeros(1, np.int64),
            contract.SELECT: np.zeros(rows, np.int64),
        }
        self.buffers[contract.TREE][0, nodes:, nodes:] = True  # nobody else sees the last node's double
        if not engine._lowered:
            self.buffers |= {
                contract.WRITE: np.zeros(1, np.int64),
                contract.COMMIT: np.zeros(accepted, np.int64),
                # The commit is exactly as long as the rows that move, so the block needs no reordering.
                contract.ORDER: np.arange(accepted + nodes, dtype=np.int64),
            }
        for name, array in self.buffers.items():
            self.binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        self.logits = engine._row_buffer[:rows]
        self.binding.bind_ortvalue_output(contract.LOGITS, ort.OrtValue.ortvalue_from_numpy(self.logits))
        if engine.features_size:
            self.features = np.zeros((1, computed, engine.features_size), engine._caches.dtype)
            self.binding.bind_ortvalue_output(contract.FEATURES, ort.OrtValue.ortvalue_from_numpy(self.features))


def _fill(buffer: NDArray[Any], rows: NDArray[Any]) -> None:
    """Copy rows into a buffer; where it has one more, that is the last again."""
    buffer[: len(rows)] = rows
    if len(buffer) > len(rows):
        buffer[-1] = rows[-1]


class OrtEngine:
    """A target on ONNX Runtime (the :class:`specexport.runtime.engine.TargetEngine` protocol).

    Args:
        bundle_path: root of a bundle.
        threads: intra-op threads, 0 for one per physical core.
        provider: what runs it.
        lowered: on the CPU, use the lowered graph where the bundle has one.
        optimize: let ONNX Runtime fuse operators; without, the graph runs as written (references).
        graph: file of the target in the bundle.
        exact: give the lowered graph even numbers of rows, so that a row does not depend on how many share its call
            (``exporter.passes.grouped_query`` says why): everything then pays two rows for one. Not where the graph
            does so for attention alone, and this machine's products are seen not to need it.
    """

    def __init__(
        self,
        bundle_path: Path,
        *,
        threads: int = 0,
        provider: Provider = CPU,
        lowered: bool = True,
        optimize: bool = True,
        graph: str = TARGET_FILE,
        exact: bool = True,
    ) -> None:
        if threads < 0:
            raise UsageError(f"threads must be 0 (automatic) or more, got {threads}")
        self._lowering = lowered and provider is CPU
        found = cpu_graph(bundle_path, graph) if self._lowering else None
        self._lowered, path = found is not None, found or bundle_path / graph
        self.tree_exact = uses_kernels(path)
        self._even = exact and self._lowered and not self.tree_exact
        self._open = partial(
            OrtEngine, bundle_path, threads=threads, provider=provider, lowered=lowered, optimize=optimize
        )
        options = session_options(threads)
        if not optimize:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        self._bundle_path, self._threads, self._provider = bundle_path, threads, provider
        self._session = load(path, options, provider)
        check_target(self._session, path, LOWERED_INPUTS if self._lowered else contract.STEP_INPUTS)
        self._caches = Caches(self._session, provider.device)
        self.slots = self._caches.shape[2] - (CPU_SPARE_ROWS if self._lowered else 0)
        self._split = self._even and self._caches.shape[-1] > WIDE_HEAD
        outputs = {value.name: value for value in self._session.get_outputs()}
        self.vocab_size = int(outputs[contract.LOGITS].shape[1])
        self.features_size = int(outputs[contract.FEATURES].shape[2]) if contract.FEATURES in outputs else 0
        self._plans: dict[tuple[int, int, int], _Plan] = {}
        self._row_buffer = np.zeros((0, self.vocab_size), np.float32)
        if self._lowered:
            self._commit_session = load(bundle_path / cpu_files(graph)[1], session_options(1), provider)
            self._commit_binding = self._commit_session.io_binding()
            self._caches.bind(self._commit_binding)
        if self._even and CPU_ANY_ROWS in self._session.get_modelmeta().custom_metadata_map:
            self._even = not self._any_rows()

    def _any_rows(self) -> bool:
        """Whether chains of 1 and 3 nodes give the very rows of one of 4: kernels differ from machine to machine."""
        self._even = False
        tokens = np.arange(1, 5) * (self.vocab_size - 1) // 4
        wide, *others = (self.run(Step.chain(tokens[:count], 1)).copy() for count in (4, 3, 1))
        self.reset()
        self._plans.clear()  # they are of these very numbers of rows
        return all(np.array_equal(rows, wide[: len(rows)]) for rows in others)

    def widest(self, past: int) -> int:
        """See :meth:`specexport.runtime.engine.StaticEngine.widest`: any number that fits, but of an exact engine whose
        heads are wide, no step over the border between two ways to add up (:data:`WIDE_HEAD`)."""
        fitting = self.slots - past
        border = NARROW_COLUMNS - 1 - past
        return min(fitting, border) if self._split and border > 0 else fitting

    def _computed(self, rows: int) -> int:
        """How many rows stand for so many; a prompt that fills all slots is the same call whoever makes it."""
        return rows + rows % 2 if self._even and rows < self.slots else rows

    def _plan(self, nodes: int, rows: int, accepted: int) -> _Plan:
        """The bound buffers of one call shape. All shapes share one logits buffer, as wide as the widest so far."""
        if (computed := self._computed(rows)) > len(self._row_buffer):
            self._row_buffer = np.zeros((computed, self.vocab_size), np.float32)
            self._plans.clear()
        key = (nodes, rows, accepted)
        plan = self._plans.pop(key, None) or _Plan(self, nodes, rows, accepted)
        self._plans[key] = plan  # last in a dict is the newest
        if len(self._plans) > MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        return plan

    def _move(self, commit: NDArray[np.int64], write: int) -> None:
        """Run the commit graph: accepted rows to their place in every cache."""
        row = np.array([write], np.int64)
        self._commit_binding.bind_cpu_input(contract.COMMIT, commit)
        self._commit_binding.bind_cpu_input(contract.WRITE, row)
        call(self._commit_session, self._commit_binding)

    def run(self, step: Step) -> NDArray[np.float32]:
        """See :meth:`specexport.runtime.engine.TargetEngine.run`."""
        tokens, positions, tree, past, write, commit, select = step
        if self._lowered and len(commit):
            self._move(np.ascontiguousarray(commit, np.int64), write)
        plan = self._plan(len(tokens), len(select), 0 if self._lowered else len(commit))
        buffers, nodes, rows = plan.buffers, len(tokens), len(select)
        _fill(buffers[contract.TOKENS][0], tokens)
        _fill(buffers[contract.POSITIONS][0], positions)
        _fill(buffers[contract.TREE][0, :, :nodes], tree)
        _fill(buffers[contract.SELECT], select)
        buffers[contract.PAST][0] = past
        if not self._lowered:
            buffers[contract.WRITE][0] = write
            buffers[contract.COMMIT][:] = commit
        call(self._session, plan.binding)
        self._last, self._nodes = plan, nodes
        return plan.logits[:rows]

    def features(self) -> NDArray[Any]:
        """See :meth:`specexport.runtime.engine.TargetEngine.features`."""
        found: NDArray[Any] = self._last.features[0, : self._nodes]
        return found

    def open_graph(self, name: str) -> OrtGraph:
        """See :meth:`specexport.runtime.engine.TargetEngine.open_graph`."""
        lowered = cpu_graph(self._bundle_path, name) if self._lowering else None
        path = lowered or self._bundle_path / name
        return open_graph(path, self._threads, self._provider.heads or self._provider)

    def grows_trees(self, name: str) -> bool:
        """See :func:`specexport.runtime.engine.grows_trees`."""
        return self._lowering and grows_trees(self._bundle_path, name)

    def open_target(self, name: str) -> OrtEngine:
        """See :meth:`specexport.runtime.engine.TargetEngine.open_target`."""
        return self._open(graph=name, exact=False)  # what it computes is a guess, whatever the width

    def reset(self) -> None:
        self._caches.zero()

    def read_cache(self, rows: int) -> list[NDArray[Any]]:
        return [value.numpy()[0, :, :rows].copy() for value in self._caches.values.values()]


def load_cpu(bundle_path: Path, *, threads: int = 0) -> OrtEngine:
    """Entry point ``onnxruntime-cpu``.

    Raises:
        UsageError: the bundle's weights are in a format that only GPUs multiply with.
    """
    manifest, exact = bundle_path / MANIFEST_NAME, True
    if manifest.is_file():
        precision = Manifest.from_json(manifest.read_bytes()).target.precision
        exact = precision.exact
        for name in ("weights", "lm_head", "embedding"):
            if (form := getattr(precision, name)) in GPU_FORMATS:
                raise UsageError(
                    f"{bundle_path}: {name} {form}: onnxruntime-cpu multiplies with fp32, fp16, bf16, int8 and int4; "
                    "build the bundle with --precision int4 or int8 for this engine"
                )
    return OrtEngine(bundle_path, threads=threads, exact=exact)


def load_cuda(bundle_path: Path, *, threads: int = 0) -> OrtEngine:
    """Entry point ``onnxruntime-cuda``."""
    return OrtEngine(bundle_path, threads=threads, provider=CUDA)


def load_tensorrt(bundle_path: Path, *, threads: int = 0) -> OrtEngine:
    """Entry point ``onnxruntime-tensorrt``; compiles at first use."""
    return OrtEngine(bundle_path, threads=threads, provider=TENSORRT)


def load_tensorrt_rtx(bundle_path: Path, *, threads: int = 0) -> OrtEngine:
    """Entry point ``onnxruntime-tensorrt-rtx``; compiles at first use."""
    return OrtEngine(bundle_path, threads=threads, provider=TENSORRT_RTX)
