"""OpenVINO on CPUs: cheap verification of many nodes, from the exported graph as it is.

Its products with quantised weights read them once for up to about eight rows, so a call of 8 nodes costs 1.2 to 1.4
times one of a single node (ONNX Runtime's: 1.7 to 2.5). ``openvino-cpu`` quantises activations to 8 bits, in groups,
where weights are quantised; ``openvino-cpu-f32`` keeps them in float32.

Caches are states of the plugin that only grow. A call appends its nodes; rows of rejected nodes stay behind and are
masked (``engines.openvino_model``), and accepted rows need no move, whatever their place. When too many rows are dead
the states are rewritten without them. Attention's threads divide the used rows, so sums depend on how many there are:
logits of a call of several nodes are not bit for bit those of plain decoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from specexport.engines.openvino_model import (
    COLUMNS,
    CONSTANT_INPUTS,
    DEAD,
    INPUTS,
    first_reason,
    read_target,
    smallest_block,
)
from specexport.engines.ort import TARGET_FILE
from specexport.engines.ort_session import OrtGraph, open_graph
from specexport.runtime import contract
from specexport.runtime.engine import Step
from specexport.runtime.errors import BundleError, SpecExportError, UsageError
from specexport.runtime.machine import physical_cores

#: Activations that share a scale when they are quantised: the fastest of 32, 64 and 128. More than the weights' block
#: costs up to a fifth.
ACTIVATION_GROUP = 128
#: Dead rows that are tolerated, and as a share of the live ones. Rewriting the states at 300 rows costs 5 to 10 ms, a
#: hundred dead rows about half a millisecond a step.
DEAD_ROWS, DEAD_SHARE = 128, 0.25


class _Rows:
    """Which row of the states holds which token: rows are appended only, tokens come and go."""

    def __init__(self, slots: int) -> None:
        self._place = np.full(slots, -1, np.int64)
        self.used = 0

    def commit(self, past: int, write: int, commit: NDArray[np.int64]) -> None:
        """Tokens ``write .. past - 1`` are those that were at the places ``commit``."""
        self._place[write:past] = self._place[commit]

    def append(self, past: int, nodes: int) -> NDArray[np.int64]:
        """Tokens ``past ..`` get new rows; returns the token of each row then, :data:`DEAD` for none."""
        end = past + nodes
        self._place[past:end] = np.arange(self.used, self.used + nodes)
        self.used += nodes
        columns = np.full(self.used, DEAD, np.int64)
        columns[self._place[:end]] = np.arange(end)
        return columns

    def live(self, tokens: int) -> NDArray[np.int64]:
        """Rows of the first tokens, in order; -1 for those that were never computed."""
        return self._place[:tokens]

    def pack(self, tokens: int) -> None:
        """The states now hold the first tokens, in order, and nothing else."""
        self._place[:tokens] = np.arange(tokens)
        self._place[tokens:] = -1
        self.used = tokens


class OpenVinoEngine:
    """A target on OpenVINO's CPU plugin (the :class:`specexport.runtime.engine.TargetEngine` protocol).

    Args:
        bundle_path: root of a bundle.
        threads: 0 for one per physical core.
        quantize_activations: to 8 bits, in products with quantised weights.
        graph: file of the target in the bundle.
    """

    #: Attention shares the rows in use among threads, so a row's last digits follow the width of its call.
    width_exact = False

    def __init__(
        self, bundle_path: Path, *, threads: int = 0, quantize_activations: bool = True, graph: str = TARGET_FILE
    ) -> None:
        if threads < 0:
            raise UsageError(f"threads must be 0 (automatic) or more, got {threads}")
        path = bundle_path / graph
        model, (_, self._heads, self.slots, self._width), self._codes = read_target(path)
        self._bundle_path, self._threads = bundle_path, threads
        self._open = partial(OpenVinoEngine, bundle_path, threads=threads, quantize_activations=quantize_activations)
        config = _config(model, threads, quantize_activations)
        try:
            self._request = ov.Core().compile_model(model, "CPU", config).create_infer_request()
        except Exception as error:  # OpenVINO's exceptions share no base of their own
            raise BundleError(f"{path}: openvino {ov.__version__} cannot compile it: {first_reason(error)}") from error
        self._states = {state.name: state for state in self._request.query_state()}
        outputs = {name: output for output in model.outputs for name in output.get_names()}
        self.vocab_size = int(outputs[contract.LOGITS].get_partial_shape()[1].get_length())
        self.features_size = (
            int(outputs[contract.FEATURES].get_partial_shape()[2].get_length()) if contract.FEATURES in outputs else 0
        )
        self._rows = _Rows(self.slots)

    def run(self, step: Step) -> NDArray[np.float32]:
        """See :meth:`specexport.runtime.engine.TargetEngine.run`."""
        past = step.past
        self._rows.commit(past, step.write, step.commit)
        if self._rows.used - past > max(DEAD_ROWS, DEAD_SHARE * past):
            self._pack(past)
        inputs = {
            contract.TOKENS: step.tokens[None],
            contract.POSITIONS: step.positions[None],
            contract.TREE: step.tree[None],
            contract.PAST: np.array([past]),
            contract.SELECT: step.select,
            COLUMNS: self._rows.append(past, len(step.tokens)),
            **CONSTANT_INPUTS,
        }
        try:
            self._request.infer(inputs, share_inputs=True)
        except Exception as error:  # see above
            raise SpecExportError(f"openvino {ov.__version__} failed in a call: {first_reason(error)}") from error
        logits: NDArray[np.float32] = self._request.get_tensor(contract.LOGITS).data
        return logits

    def _pack(self, tokens: int) -> None:
        """Rewrite the states with the rows of the first tokens alone."""
        if not tokens:
            self.reset()
            return
        rows = self._rows.live(tokens)
        for state in self._states.values():
            state.state = ov.Tensor(np.ascontiguousarray(state.state.data[:, :, rows]))
        self._rows.pack(tokens)

    def features(self) -> NDArray[Any]:
        """See :meth:`specexport.runtime.engine.TargetEngine.features`."""
        found: NDArray[Any] = self._request.get_tensor(contract.FEATURES).data[0]
        return found

    def open_graph(self, name: str) -> OrtGraph:
        """See :meth:`specexport.runtime.engine.TargetEngine.open_graph`: drafters stay on ONNX Runtime."""
        return open_graph(self._bundle_path / name, self._threads)

    def open_target(self, name: str) -> OpenVinoEngine:
        """See :meth:`specexport.runtime.engine.TargetEngine.open_target`."""
        return self._open(graph=name)

    def reset(self) -> None:
        self._request.reset_state()
        self._rows = _Rows(self.slots)

    def read_cache(self, rows: int) -> list[NDArray[Any]]:
        """See :meth:`specexport.runtime.engine.TargetEngine.read_cache`; rows that were never computed are zero."""
        places = self._rows.live(rows)
        found = []
        for past, _ in contract.cache_names(len(self._states) // 2):
            cache = self._states[past].state.data
            copy = np.zeros((self._heads, rows, self._width), cache.dtype)
            if self._rows.used:  # a state that was reset has no batch either
                copy[:, places >= 0] = cache[0][:, places[places >= 0]]
            found.append(copy)
        return found


def _config(model: ov.Model, threads: int, quantize_activations: bool) -> dict[str, Any]:
    group = min(ACTIVATION_GROUP, smallest_block(model) or ACTIVATION_GROUP) if quantize_activations else 0
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads or physical_cores(),
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(group),
    }


def trace(
    path: Path,
    names: Iterable[str],
    inputs: Mapping[str, NDArray[Any]],
    *,
    threads: int = 0,
    quantize_activations: bool = True,
) -> dict[str, NDArray[Any]]:
    """Inner tensors of a target in a call from empty caches: those of ``names`` that the converted model has.

    Args:
        inputs: of the exported graph; the caches' and the commit's are not looked at.
    """
    model, _, _codes = read_target(path)
    kept = {name for node in model.get_ops() for output in node.outputs() for name in output.get_names()}
    have = {name for output in model.outputs for name in output.get_names()}
    wanted = [name for name in names if name in kept and name not in have]
    model.add_outputs(wanted)
    fed = {name: inputs[name] for name in INPUTS} | {COLUMNS: np.arange(inputs[contract.TOKENS].shape[1])}
    try:
        compiled = ov.Core().compile_model(model, "CPU", _config(model, threads, quantize_activations))
        request = compiled.create_infer_request()
        request.infer({**fed, **CONSTANT_INPUTS})
    except Exception as error:  # see above
        raise SpecExportError(f"{path}: openvino {ov.__version__} failed: {first_reason(error)}") from error
    return {name: request.get_tensor(name).data.copy() for name in wanted}


def load_cpu(bundle_path: Path, *, threads: int = 0) -> OpenVinoEngine:
    """Entry point ``openvino-cpu``."""
    return OpenVinoEngine(bundle_path, threads=threads)


def load_cpu_f32(bundle_path: Path, *, threads: int = 0) -> OpenVinoEngine:
    """Entry point ``openvino-cpu-f32``: activations are not quantised."""
    return OpenVinoEngine(bundle_path, threads=threads, quantize_activations=False)
