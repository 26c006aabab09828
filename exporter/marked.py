"""Graphs run once with their inner tensors as outputs, on the exported graph's reference and on a backend.

Names are what the two have in common: passes keep the names of the values that they keep.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from specexport.engines.ort import LOWERED_INPUTS, TARGET_FILE, cpu_graph
from specexport.engines.ort_providers import CPU, PROVIDERS, Provider
from specexport.engines.ort_session import use_kernels
from specexport.runtime.errors import SpecExportError
from specexport.runtime.machine import physical_cores

Arrays = dict[str, NDArray[Any]]
_CACHES = ("past_k.", "past_v.")


def marked(bundle: Path, backend: str, inputs: Arrays, threads: int) -> tuple[dict[str, str], Arrays, Arrays]:
    """One call from empty caches.

    Args:
        backend: of ``ort_providers.PROVIDERS``, or one of OpenVINO. inputs: of the exported target, without caches.

    Returns:
        Operators by the tensor they make, in graph order; the tensors of the reference, those of the backend.
    """
    graph = onnx.load(bundle / TARGET_FILE, load_external_data=False).graph
    operators = {name: node.op_type for node in graph.node for name in node.output if name}
    expected = _run_onnx(bundle / TARGET_FILE, operators, inputs, CPU, threads, optimize=False)
    if backend.startswith("openvino"):
        seen = _run_openvino(bundle / TARGET_FILE, operators, inputs, threads, "f32" not in backend)
    else:
        provider = PROVIDERS[backend]
        lowered = cpu_graph(bundle, TARGET_FILE) if provider is CPU else None
        if lowered is not None:
            fed = {name: inputs[name] for name in LOWERED_INPUTS}
            seen = _run_onnx(lowered, operators, fed, provider, threads, optimize=True)
        else:
            seen = _run_onnx(bundle / TARGET_FILE, operators, inputs, provider, threads, optimize=True)
    return operators, expected, seen


def _run_onnx(
    path: Path, names: Iterable[str], inputs: Arrays, provider: Provider, threads: int, *, optimize: bool
) -> Arrays:
    """Those of ``names`` that the graph has."""
    model = onnx.load(path, load_external_data=False)
    made = {name for node in model.graph.node for name in node.output}
    have = {value.name for value in model.graph.output}
    wanted = [name for name in names if name in made and not name.startswith(("present_k.", "present_v."))]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in have)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or physical_cores()
    options.log_severity_level = 4
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    use_kernels(path, options)
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    caches = {
        value.name: np.zeros(
            [dim.dim_value for dim in value.type.tensor_type.shape.dim],
            onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type),
        )
        for value in model.graph.input
        if value.name.startswith(_CACHES)
    }
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=provider.configure(options))
        return dict(zip(wanted, session.run(wanted, inputs | caches), strict=True))
    except SpecExportError:
        raise
    except Exception as error:  # onnxruntime's exceptions share no base of their own
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise SpecExportError(
            f"{path}, with its tensors as outputs, does not run on {provider.name}: {reason}"
        ) from error


def _run_openvino(path: Path, names: Iterable[str], inputs: Arrays, threads: int, quantize: bool) -> Arrays:
    from specexport.engines.openvino import trace

    return trace(path, names, inputs, threads=threads, quantize_activations=quantize)
