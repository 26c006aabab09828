"""Target graphs with the operator compile where TensorRT-RTX is installed: no GPU is needed for that."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import onnx_ir as ir
import pytest

from specexport.engines.plugins.tree_attention import plugin, toolchain
from specexport.exporter.passes import tree_attention
from specexport.runtime.errors import UsageError
from tests.exporter.test_parity import CASES, reference, save_engine

Run = Callable[..., subprocess.CompletedProcess[str]]

COMPILE = """
import sys
import tensorrt_rtx as trt
graph, library = sys.argv[1:]
lines = []
class Log(trt.ILogger):
    def __init__(self):
        trt.ILogger.__init__(self)
    def log(self, severity, text):
        lines.append(text)
log = Log()
builder = trt.Builder(log)
registry = trt.get_plugin_registry()
if library:
    registry.load_library(library)
else:
    from specexport.engines.plugins.tree_attention import plugin
    plugin.register(trt)
    plugin.register(trt)
creators = [creator.name for creator in registry.all_creators]
assert creators.count("TreeAttention") == 1, creators
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
parser = trt.OnnxParser(network, log)
assert parser.parse_from_file(graph), [str(parser.get_error(i)) for i in range(parser.num_errors)]
config = builder.create_builder_config()
config.num_compute_capabilities = 1
assert config.set_compute_capability(trt.ComputeCapability.SM89, 0)
config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
if library:
    config.plugins_to_serialize = [library]
for nodes, accepted in ((1, 8), (40, 40)):
    sizes = {"T": nodes, "A": accepted, "O": accepted + nodes, "R": nodes}
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        value = network.get_input(index)
        if -1 in tuple(value.shape):
            names = [value.get_dimension_name(axis) for axis in range(len(value.shape))]
            shape = [sizes.get(name, size) for name, size in zip(names, value.shape)]
            profile.set_shape(value.name, shape, shape, shape)
    config.add_optimization_profile(profile)
plan = builder.build_serialized_network(network, config)
print("plan", plan.nbytes, sum(line.count("PLUGIN_V3 node_TreeAttention") for line in lines))
"""


@pytest.fixture(scope="module")
def trt_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unversioned name that TensorRT-RTX loads itself by when it meets a plugin."""
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    if spec is None or spec.origin is None:
        pytest.skip("tensorrt-rtx is not installed")
    folder = tmp_path_factory.mktemp("tensorrt")
    (folder / "libtensorrt_rtx.so").symlink_to(next(Path(spec.origin).parent.glob("libtensorrt_rtx.so.*")))
    return folder


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lowered half-precision target of two layers with a window, whose heads have a kernel."""
    folder = tmp_path_factory.mktemp("target")
    sizes = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 10}
    CASES["wide"] = ("Mistral", sizes)
    try:
        _, config, weights = reference("wide")
    finally:
        del CASES["wide"]
    save_engine(config, weights, folder, "fp16")
    model = ir.load(folder / "target.onnx")
    tree_attention.lower(model, [layer.window for layer in config.layers])
    ir.save(model, folder / "lowered.onnx")
    return folder / "lowered.onnx"


def test_an_old_tensorrt_is_refused() -> None:
    with pytest.raises(UsageError, match=r"tensorrt 10\.0\.1 has no IPluginV3OneBuildV2: 10\.3 or later"):
        plugin.register(SimpleNamespace(__name__="tensorrt", __version__="10.0.1"))  # type: ignore[arg-type]


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr[-2000:]
    word, size, plugins = done.stdout.split()[-3:]
    assert word == "plan" and int(size) > 0
    assert int(plugins) == 2, "one for each layer"


def test_graph_compiles_with_the_python_plugin(graph: Path, trt_libraries: Path, run_python: Run) -> None:
    check(run_python("-c", COMPILE, str(graph), "", LD_LIBRARY_PATH=str(trt_libraries)))


def test_graph_compiles_with_the_library(graph: Path, trt_libraries: Path, run_python: Run, tmp_path: Path) -> None:
    """The C++ plugin, built as its users build it, is found by TensorRT and goes into the plan."""
    root, nvcc = os.environ.get("TENSORRT_ROOT"), toolchain.find_nvcc()
    if root is None or nvcc is None or shutil.which("cmake") is None:
        pytest.skip("needs cmake, nvcc, and the headers of TensorRT: set TENSORRT_ROOT")
    source = toolchain.SOURCE / "tensorrt"
    options = ["-DTREE_ATTENTION_HEAD_DIM=64", "-DCMAKE_CUDA_ARCHITECTURES=89", f"-DCMAKE_CUDA_COMPILER={nvcc.path}"]
    for command in (
        ["cmake", "-S", str(source), "-B", str(tmp_path), f"-DTENSORRT_ROOT={root}", *options],
        ["cmake", "--build", str(tmp_path)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    library = next(tmp_path.glob("libspecexport_tree_attention.so"))
    check(run_python("-c", COMPILE, str(graph), str(library), LD_LIBRARY_PATH=str(trt_libraries)))
