"""Sessions of ONNX Runtime: how they are opened and called, caches that stay in place, and graphs of drafters."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from specexport.engines.kernels.library import kernels_library
from specexport.engines.ort_providers import CPU, Provider
from specexport.runtime import contract
from specexport.runtime.errors import BundleError, SpecExportError
from specexport.runtime.machine import physical_cores

#: Ending of graphs that use our own kernels (``engines/kernels``).
KERNELS_SUFFIX = ".kernels.onnx"

_NUMPY: dict[str, np.dtype[Any]] = {"tensor(float)": np.dtype(np.float32), "tensor(float16)": np.dtype(np.float16)}


def session_options(threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or physical_cores()
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # Memory patterns are kept per input shape: with a tree width and a length that change every step they only grow.
    options.enable_mem_pattern = False
    # Threads that go on spinning after a call take the cores from the next graph (a drafter's) and from the host: with
    # three sessions a step took twice as long. Alone, stopping costs nothing that could be measured.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 4  # errors come as exceptions, once
    return options


def open_session(path: Path, options: ort.SessionOptions, providers: list[Any]) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(os.fspath(path), options, providers=providers)
    except Exception as error:  # onnxruntime's exceptions share no base of their own
        reason = (str(error).splitlines() or ["no reason given"])[0]
        if "NOT_IMPLEMENTED" in reason:
            reason += "; if the bundle is bf16, build it with --activations fp32 for this engine"
        raise BundleError(f"{path}: onnxruntime {ort.__version__} cannot load it: {reason}") from error


def check_target(session: ort.InferenceSession, path: Path, step_inputs: Iterable[str]) -> None:
    """Refuse a graph that is not a target: another bundle's, another version's, or a hostile one.

    Raises:
        BundleError: an input or output is missing or unknown, or the caches have no static shape of a known type.
    """
    inputs = {value.name: value for value in session.get_inputs()}
    outputs = {value.name for value in session.get_outputs()} - {contract.FEATURES}
    caches = contract.cache_names(sum(name.startswith("past_k.") for name in inputs))
    wrong = inputs.keys() ^ {*step_inputs, *(past for past, _ in caches)}
    wrong |= outputs ^ {contract.LOGITS, *(present for _, present in caches)}
    if wrong:
        raise BundleError(f"{path} is not a target graph: {min(wrong)} is missing or unknown; build the bundle again")
    kinds = {(*inputs[past].shape, inputs[past].type) for past, _ in caches}
    *shape, kind = min(kinds, key=str, default=((), ""))
    if len(kinds) != 1 or len(shape) != 4 or not all(isinstance(dim, int) for dim in shape) or kind not in _NUMPY:
        raise BundleError(f"{path}: the caches are {sorted(kinds, key=str)[:2]}, expected one shape of {list(_NUMPY)}")


def call(session: ort.InferenceSession, binding: ort.IOBinding) -> None:
    with _one_line():
        session.run_with_iobinding(binding)


@contextmanager
def _one_line() -> Iterator[None]:
    """Turn what onnxruntime raises in a call into an error of ours."""
    try:
        yield
    except Exception as error:  # see _open
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise SpecExportError(f"onnxruntime {ort.__version__} failed in a call of a graph: {reason}") from error


class Caches:
    """The cache tensors of one sequence and their binding to a session."""

    def __init__(self, session: ort.InferenceSession, device: str) -> None:
        self.values: dict[str, ort.OrtValue] = {}
        self.shape: tuple[int, ...] = ()
        for value in session.get_inputs():
            if value.name.startswith(("past_k.", "past_v.")):
                self.shape = tuple(int(dim) for dim in value.shape)
                self.dtype = _NUMPY[value.type]
                zeros = np.zeros(self.shape, self.dtype)
                self.values[value.name] = ort.OrtValue.ortvalue_from_numpy(zeros, device, 0)

    def bind(self, binding: ort.IOBinding) -> None:
        for past, value in self.values.items():
            binding.bind_ortvalue_input(past, value)
            binding.bind_ortvalue_output(past.replace("past_", "present_", 1), value)

    def zero(self) -> None:
        zeros = np.zeros(self.shape, self.dtype)
        for value in self.values.values():
            value.update_inplace(zeros)


class OrtGraph:
    """A drafter's graph (the :class:`specexport.runtime.engine.Graph` protocol); its caches, if any, stay in place."""

    def __init__(self, session: ort.InferenceSession, device: str) -> None:
        self._session = session
        self._caches = Caches(session, device)
        outputs = [value.name for value in session.get_outputs()]
        self._names = [name for name in outputs if not name.startswith(("present_k.", "present_v."))]

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """See :meth:`specexport.runtime.engine.Graph.run`."""
        if not self._caches.values:
            with _one_line():
                return dict(zip(self._names, self._session.run(None, dict(inputs)), strict=True))
        binding = self._session.io_binding()
        held = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        for name, array in held.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        for name in self._names:
            binding.bind_output(name)
        self._caches.bind(binding)
        call(self._session, binding)
        results = binding.get_outputs()[: len(self._names)]
        return {name: value.numpy() for name, value in zip(self._names, results, strict=True)}


def open_graph(path: Path, threads: int = 0, provider: Provider = CPU) -> OrtGraph:
    """A drafter's graph, also for targets on engines that have none of their own."""
    return OrtGraph(load(path, session_options(threads), provider), provider.device)


def uses_kernels(path: Path) -> bool:
    """Whether a graph is one for our own kernels."""
    return path.name.endswith(KERNELS_SUFFIX)


def use_kernels(path: Path, options: ort.SessionOptions) -> None:
    """Load our own kernels for a session of a graph that uses them.

    Raises:
        BundleError: they are not there, or do not load.
    """
    if not uses_kernels(path):
        return
    library = kernels_library()
    if library is None:
        raise BundleError(f"{path} needs specexport's kernels, which are not installed: 'specexport doctor' says why")
    try:
        options.register_custom_ops_library(str(library))
    except Exception as error:  # see open_session
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise BundleError(f"{library} does not load: {reason}; SPECEXPORT_KERNELS=off runs without it") from error


def load(path: Path, options: ort.SessionOptions, provider: Provider) -> ort.InferenceSession:
    """A session that really runs on the provider, with our kernels where the graph uses them."""
    use_kernels(path, options)
    session = open_session(path, options, provider.configure(options))
    provider.confirm(session, path)
    return session
