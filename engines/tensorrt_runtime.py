"""Compiled plans as an engine: TensorRT and TensorRT-RTX, without torch.

What crosses to the host after a call are the best tokens of each row, where the plan gives them
(``exporter.passes.summary``); rows of logits and features follow when they are asked for. Nothing here computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.engines.cuda import Device
from specexport.engines.ort_session import OrtGraph, open_graph
from specexport.engines.plan import plan_names
from specexport.engines.plan_loader import NUMPY, Tensorrt, choose, load
from specexport.engines.plan_runner import PlanRunner, floats
from specexport.engines.static_width import StaticWidths, Width
from specexport.runtime import contract
from specexport.runtime.bundle import TARGET_GRAPH
from specexport.runtime.engine import Graph, Step
from specexport.runtime.errors import BundleError, UsageError
from specexport.runtime.manifest import MANIFEST_NAME, Manifest
from specexport.runtime.summary import LazyRow, Row

_SUMMARY = (contract.TOP_VALUES, contract.TOP_TOKENS)


class PlanGraph:
    """A drafter's plan (the :class:`specexport.runtime.engine.Graph` protocol).

    A recurrent head's plan pins how many entries a call appends. They cannot be padded, because a tree grows from the
    last: what no profile fits is appended in several calls.
    """

    def __init__(self, trt: Tensorrt, bundle: Path, folder: Path, name: str, *, graphs: bool = True) -> None:
        record, engine = load(bundle, folder, name, trt)
        outputs = [x.name for x in record.outputs if not x.name.startswith("present_")]
        self._runner, self._names, self._record = (
            PlanRunner(trt, engine, record, outputs, graphs=graphs),
            outputs,
            record,
        )
        self._sizes = {profile.dims.get("A", 0): profile.index for profile in record.profiles}
        self._axes = {x.name: x.shape.index("A") for x in record.inputs if "A" in x.shape}

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """See :meth:`specexport.runtime.engine.Graph.run`."""
        if not self._axes:
            self._call(0, inputs)
        else:
            name, axis = next(iter(self._axes.items()))
            self._append(inputs, inputs[name].shape[axis])
        return {name: self._runner.output(name).copy() for name in self._names}

    def _append(self, inputs: Mapping[str, NDArray[Any]], count: int) -> None:
        done = 0
        while done < count:
            size = max((size for size in self._sizes if size <= count - done), default=0)
            if not size:
                raise UsageError(f"{self._record.plan} has no profile for {count - done} entries: compile it again")
            piece = {
                name: array[(slice(None),) * self._axes[name] + (slice(done, done + size),)]
                if name in self._axes
                else array + done
                if name == contract.PAST
                else array
                for name, array in inputs.items()
            }
            self._call(self._sizes[size], piece)
            done += size

    def _call(self, index: int, inputs: Mapping[str, NDArray[Any]]) -> None:
        arrays = self._runner.inputs(index)
        if inputs.keys() != arrays.keys():
            odd = min(inputs.keys() ^ arrays.keys())
            raise BundleError(f"{self._record.plan}: input {odd} is missing or unknown, build the bundle again")
        for name, array in inputs.items():
            place = arrays[name]
            if array.shape != place.shape or array.dtype.kind != place.dtype.kind:
                raise UsageError(
                    f"{self._record.plan}: {name} is {array.dtype} {list(array.shape)}, expected {place.dtype} "
                    f"{list(place.shape)}"
                )
            place[...] = array
        self._runner.run(index)


class PlanEngine:
    """A target's plan (:class:`specexport.runtime.engine.TargetEngine`, with rows on request and static widths).

    Args:
        trt: module and device. bundle: root of a bundle. folder: of its plans for this device.
        graph: of the target. graphs: capture CUDA graphs. threads: of drafters that run on the CPU, 0 for one per
            physical core.
    """

    #: Each profile has kernels of its own, so a row's last digits follow the width of its call.
    width_exact = False

    def __init__(
        self,
        trt: Tensorrt,
        bundle: Path,
        folder: Path,
        *,
        graph: str = TARGET_GRAPH,
        graphs: bool = True,
        threads: int = 0,
    ) -> None:
        self._trt, self._bundle, self._folder, self._graphs, self._threads = trt, bundle, folder, graphs, threads
        record, engine = load(bundle, folder, graph, trt)
        outputs = {x.name: x for x in record.outputs}
        if contract.LOGITS not in outputs or not {*contract.STEP_INPUTS} <= {x.name for x in record.inputs}:
            raise BundleError(f"{record.plan} is not a target's plan: compile the bundle again")
        self._summarises = outputs.keys() >= {*_SUMMARY}
        wanted = _SUMMARY if self._summarises else (contract.LOGITS,)
        self._runner = PlanRunner(trt, engine, record, wanted, graphs=graphs)
        widths = [Width(p.index, p.dims["T"], p.dims["A"], p.dims["R"]) for p in record.profiles]
        self._widths = StaticWidths(widths, record.slots, record.plan)
        self.slots = record.slots
        self.vocab_size = int(outputs[contract.LOGITS].shape[1])
        self.features_size = int(outputs[contract.FEATURES].shape[2]) if contract.FEATURES in outputs else 0
        self._features_dtype = NUMPY[outputs[contract.FEATURES].dtype] if self.features_size else None
        target = Manifest.from_json((bundle / MANIFEST_NAME).read_bytes()).target
        self._valid = target.valid_vocab
        self._nodes = 0  # of the last piece of the last call
        self._earlier: list[NDArray[Any]] = []  # features of the pieces before it

    def run(self, step: Step) -> NDArray[np.float32]:
        """See :meth:`specexport.runtime.engine.TargetEngine.run`."""
        rows = [self._rows(0, count) for count, _ in self._calls(step)]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def run_rows(self, step: Step) -> Sequence[Row]:
        """See :meth:`specexport.runtime.engine.SummarisingEngine.run_rows`."""
        rows: list[Row] = []
        for count, last in self._calls(step):
            rows += self._lazy(count) if last else list(self._rows(0, count))  # the next call takes them
        return rows

    def _calls(self, step: Step) -> Iterator[tuple[int, bool]]:
        """Run a step in its pieces; after each, how many rows of logits it has and whether it was the last."""
        self._earlier, self._nodes = [], 0
        pieces = list(self._widths.pieces(step))
        for number, (width, piece) in enumerate(pieces, 1):
            if self._nodes and self.features_size:
                self._earlier.append(self._last_features())
            self._widths.fill(self._runner.inputs(width.index), width, piece)
            self._runner.run(width.index)
            self._nodes = len(piece.tokens)
            yield len(piece.select), number == len(pieces)

    def _rows(self, first: int, count: int) -> NDArray[np.float32]:
        if not count:
            return np.zeros((0, self.vocab_size), np.float32)
        if not self._summarises:
            return self._runner.output(contract.LOGITS)[first : first + count].copy()
        flat = self._runner.fetch(contract.LOGITS, first * self.vocab_size, count * self.vocab_size)
        return flat.reshape(count, self.vocab_size)

    def _lazy(self, count: int) -> Sequence[Row]:
        if not self._summarises:
            return list(self._runner.output(contract.LOGITS)[:count])
        values, tokens = (self._runner.output(name) for name in _SUMMARY)
        return [
            LazyRow(tokens[row], values[row], self._valid, lambda row=row: self._rows(row, 1)[0])  # type: ignore[misc]
            for row in range(count)
        ]

    def _last_features(self) -> NDArray[Any]:
        flat = self._runner.fetch(contract.FEATURES, 0, self._nodes * self.features_size)
        return flat.reshape(self._nodes, self.features_size)

    def features(self) -> NDArray[Any]:
        """See :meth:`specexport.runtime.engine.TargetEngine.features`; bf16 as raw bits, as plans take it."""
        last = self._last_features()
        return np.concatenate([*self._earlier, last]) if self._earlier else last

    def widest(self, past: int) -> int:
        """See :meth:`specexport.runtime.engine.StaticEngine.widest`."""
        return self._widths.widest(past)

    def open_graph(self, name: str) -> Graph:
        """See :meth:`specexport.runtime.engine.TargetEngine.open_graph`; what was not compiled runs on the CPU.

        Raises:
            BundleError: neither does: the CPU's ONNX Runtime has no bf16.
        """
        if (self._folder / plan_names(name)[1]).is_file():
            return PlanGraph(self._trt, self._bundle, self._folder, name, graphs=self._graphs)
        found: OrtGraph = open_graph(self._bundle / name, self._threads)
        return found

    def open_target(self, name: str) -> PlanEngine:
        """See :meth:`specexport.runtime.engine.TargetEngine.open_target`."""
        return PlanEngine(self._trt, self._bundle, self._folder, graph=name, graphs=self._graphs, threads=self._threads)

    def reset(self) -> None:
        self._runner.reset()

    def read_cache(self, rows: int) -> list[NDArray[Any]]:
        """See :meth:`specexport.runtime.engine.TargetEngine.read_cache`; bf16 as float32."""
        kind = next(x.dtype for x in self._runner.record.inputs if x.name.startswith("past_"))
        return [floats(cache[0, :, :rows].copy(), kind) for cache in self._runner.read_caches()]


def _load(name: str, bundle_path: Path, threads: int, graphs: bool) -> PlanEngine:
    if threads < 0:
        raise UsageError(f"threads must be 0 (automatic) or more, got {threads}")
    trt = Tensorrt.open(name, Device())
    return PlanEngine(trt, bundle_path, choose(bundle_path, trt), graphs=graphs, threads=threads)


def load_tensorrt(bundle_path: Path, *, threads: int = 0, graphs: bool = True) -> PlanEngine:
    """Entry point ``tensorrt``. ``threads`` is of drafters that were not compiled; ``graphs`` captures CUDA graphs."""
    return _load("tensorrt", bundle_path, threads, graphs)


def load_tensorrt_rtx(bundle_path: Path, *, threads: int = 0, graphs: bool = True) -> PlanEngine:
    """Entry point ``tensorrt-rtx``; see :func:`load_tensorrt`."""
    return _load("tensorrt_rtx", bundle_path, threads, graphs)
