"""From a bundle's compiled plans to a deserialised engine, with everything checked first: a plan is executable.

What is compared before TensorRT sees a byte: the record with the installed module and its version, the device's
capability, the sources in the manifest, the plugins that are registered, the memory that is free, the plan's size and
digest. Afterwards the engine's tensors with the record, because memory is laid out by that.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from specexport.engines.cuda import Device, mebibytes
from specexport.engines.plan import RECORD_SUFFIX, PlanRecord, TensorInfo, check_sources, plan_names, read_plan
from specexport.engines.tensorrt_module import Compiler, plugins_need_library
from specexport.runtime.bundle import ENGINES, TARGET_GRAPH, inside
from specexport.runtime.errors import BundleError, SpecExportError, UsageError
from specexport.runtime.manifest import MANIFEST_NAME, Manifest

_LOG = logging.getLogger(__name__)
#: Plugin libraries to load before a plan that needs plugins, separated as a search path is.
PLUGINS_VARIABLE = "SPECEXPORT_PLUGINS"
#: Memory beside weights, caches and buffers that a plan's activations are given before it is refused up front.
_ACTIVATIONS = 64 << 20

#: Element types by their name in a record: as numpy holds them (bf16 and fp8 as raw bits), and as TensorRT calls them.
NUMPY: dict[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "int8": np.dtype(np.int8),
    "fp8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
}
_TENSORRT = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16"}


@dataclass(frozen=True, slots=True)
class Tensorrt:
    """A TensorRT module with a runtime on a device.

    Attributes:
        module: ``tensorrt`` or ``tensorrt_rtx``. name: of it. version: its own. device: that plans run on.
        runtime: deserialises. log: what went wrong last.
    """

    module: Any
    name: str
    version: str
    device: Device
    runtime: Any
    log: Any

    @staticmethod
    def open(name: str, device: Device) -> Tensorrt:
        """Import ``tensorrt`` or ``tensorrt_rtx``.

        Raises:
            UsageError: it is not installed or cannot be loaded.
        """
        extra = name.replace("_", "-")
        try:
            module = import_module(name)
        except (ImportError, OSError) as error:
            raise UsageError(
                f"engine {extra!r} needs {name}: install it with \"pip install 'specexport[{extra}]'\" "
                f"({(str(error).splitlines() or ['no reason given'])[0]})"
            ) from None
        log = _log(module)
        return Tensorrt(module, name, str(module.__version__), device, module.Runtime(log), log)


def tensor_bytes(tensor: TensorInfo, shape: tuple[int, ...]) -> int:
    """Size of a tensor of this shape."""
    size = NUMPY[tensor.dtype].itemsize
    for dim in shape:
        size *= dim
    return size


def choose(bundle: Path, trt: Tensorrt) -> Path:
    """The folder of ``bundle/engines`` whose plan of the target runs here.

    Raises:
        BundleError: there is none, and why the nearest is none.
    """
    folders = sorted(path.parent for path in (bundle / ENGINES).glob(f"[!.]*/{plan_names(TARGET_GRAPH)[1]}"))
    reasons = []
    for folder in folders:
        record = read_plan(folder, TARGET_GRAPH)
        if (reason := unfit(record, trt)) is None:
            return folder
        reasons.append((record.module != trt.name, f"{ENGINES}/{folder.name} {reason}"))
    found = min(reasons)[1] if reasons else f"{ENGINES}/ has no *{RECORD_SUFFIX}"
    raise BundleError(
        f"no plan of this bundle runs on {trt.device.name}: {found}; make one with "
        f"'specexport compile {bundle} --profile DEVICE --backend {trt.name.replace('_', '-')}'"
    )


def unfit(record: PlanRecord, trt: Tensorrt) -> str | None:
    """Why a plan does not run here, None if it does."""
    if record.module != trt.name:
        return f"was compiled by {record.module}, this engine is {trt.name}"
    if record.version != trt.version:
        return f"was compiled by {record.module} {record.version}, installed is {trt.version}"
    if trt.device.capability not in record.capabilities:
        return f"is for capability {', '.join(record.capabilities)}, the device has {trt.device.capability}"
    return None


def load(bundle: Path, folder: Path, graph: str, trt: Tensorrt) -> tuple[PlanRecord, Any]:
    """The record and the deserialised engine of ``graph``'s plan in ``folder``.

    Raises:
        BundleError: damaged, of another bundle, device or version. SpecExportError: a plugin or memory is missing.
    """
    record = read_plan(folder, graph)
    if (reason := unfit(record, trt)) is not None:
        raise BundleError(f"{folder.name}/{record.plan} {reason}: compile it again")
    manifest = Manifest.from_json((bundle / MANIFEST_NAME).read_bytes())
    check_sources(record, manifest.files)
    listed = manifest.files.get(f"{ENGINES}/{folder.name}/{record.plan}")
    if listed is not None and (listed.bytes, listed.sha256) != (record.bytes, record.sha256):
        raise BundleError(f"{record.plan} is not the one that {MANIFEST_NAME} lists: copy or build the bundle again")
    _check_plugins(record, trt)
    _check_memory(record, trt.device)
    with _checked(folder, record) as plan:
        engine = trt.runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise BundleError(f"{trt.name} {trt.version} cannot load {record.plan}: {trt.log.last}; compile it again")
    _check_engine(record, engine)
    return _in_place(record, engine), engine


def _in_place(record: PlanRecord, engine: Any) -> PlanRecord:
    """Without the aliases that the engine does not know: those caches are copied after all, and must not be shared.

    Whether plugins' aliases are reported is not known, so with plugins the record is believed.
    """
    if record.plugins or not hasattr(engine, "get_aliased_input_tensor"):
        return record
    known = {name: source for name, source in record.aliases.items() if engine.get_aliased_input_tensor(name) == source}
    if len(known) < len(record.aliases):
        _LOG.warning("%s copies %d caches in each call", record.plan, len(record.aliases) - len(known))
    return replace(record, aliases=known)


def _log(module: Any) -> Any:
    class Log(module.ILogger):  # type: ignore[misc]
        """Keeps the last error, hands the rest to :mod:`logging`."""

        def __init__(self) -> None:
            super().__init__()
            self.last = "no reason given"

        def log(self, severity: Any, message: str) -> None:
            """See ``ILogger.log``: severities 0 and 1 are errors."""
            if int(severity) <= 1:
                self.last = (message.splitlines() or ["no reason given"])[0]
            _LOG.debug("%s", message)

    return Log()


@contextmanager
def _checked(folder: Path, record: PlanRecord) -> Iterator[mmap.mmap]:
    """A plan's bytes, mapped and not read into memory, once the size and digest of the very same file are right."""
    path = inside(folder.resolve(), record.plan)
    with path.open("rb") as stream:
        if (size := os.fstat(stream.fileno()).st_size) != record.bytes:
            raise BundleError(f"{record.plan} has {size} bytes, its record says {record.bytes}: compile it again")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as plan:
            if (digest := hashlib.sha256(plan).hexdigest()) != record.sha256:
                raise BundleError(
                    f"{record.plan} has sha256 {digest}, its record says {record.sha256}: it is damaged and was not "
                    "loaded, compile it again"
                )
            yield plan


def _check_plugins(record: PlanRecord, trt: Tensorrt) -> None:
    if not record.plugins:
        return
    if plugins_need_library(Compiler(trt.module, trt.name, trt.version, (), ())):
        raise SpecExportError(
            f"{record.plan} needs {record.plugins[0]}, and a plugin ends the process where TensorRT-RTX finds no "
            "libtensorrt_rtx.so: link that name to libtensorrt_rtx.so.1 and put its folder into LD_LIBRARY_PATH"
        )
    registry = trt.module.get_plugin_registry()
    for library in filter(None, os.environ.get(PLUGINS_VARIABLE, "").split(os.pathsep)):
        if registry.load_library(library) is None:
            raise SpecExportError(f"{trt.name} cannot load {library} of {PLUGINS_VARIABLE}: {trt.log.last}")
    for plugin in record.plugins:
        space, _, rest = plugin.partition("::")
        name, _, version = rest.rpartition(":")
        if registry.get_creator(name, version, space) is None:
            raise SpecExportError(
                f"{record.plan} needs the plugin {plugin}: build its library (engines/plugins) and name it in "
                f"{PLUGINS_VARIABLE}, or compile without plugins"
            )


def _check_memory(record: PlanRecord, device: Device) -> None:
    """Refuse before a partly loaded plan fails in the middle of a driver call."""
    widest = [max(tensor_bytes(x, p.shape(x)) for p in record.profiles) for x in (*record.inputs, *record.outputs)]
    shared = sum(widest[[x.name for x in record.inputs].index(source)] for source in record.aliases.values())
    need, free = record.bytes + sum(widest) - shared + _ACTIVATIONS, device.free_bytes()
    if need > free:
        raise SpecExportError(
            f"{record.plan} needs about {mebibytes(need)} on {device.name}, {mebibytes(free)} are free: close what "
            "else uses it, or build the bundle with a smaller --window or --precision int4"
        )


def _check_engine(record: PlanRecord, engine: Any) -> None:
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    tensors = {x.name: x for x in (*record.inputs, *record.outputs)}
    wrong = set(names) ^ tensors.keys()
    if engine.num_optimization_profiles != len(record.profiles):
        wrong = {f"its number of profiles, {engine.num_optimization_profiles}"}
    for name in set(names) - wrong:
        tensor, shape = tensors[name], tuple(engine.get_tensor_shape(name))
        if engine.get_tensor_dtype(name).name != _TENSORRT.get(tensor.dtype, tensor.dtype.upper()):
            wrong.add(name)
        if len(shape) != len(tensor.shape) or any(
            isinstance(said, int) and said != size for said, size in zip(tensor.shape, shape, strict=True)
        ):
            wrong.add(name)
        for profile in record.profiles if tensor in record.inputs else ():
            _, _, most = engine.get_tensor_profile_shape(name, profile.index)
            if tuple(most) != profile.shape(tensor):
                wrong.add(name)
    for x in record.outputs if hasattr(engine, "get_aliased_input_tensor") else ():
        if x.name in names and (source := engine.get_aliased_input_tensor(x.name)) not in (
            None,
            record.aliases.get(x.name),
        ):
            wrong.add(f"{x.name} in the memory of {source}")
    if wrong:
        raise BundleError(f"{record.plan} is not what its record says, first in {min(wrong)}: compile it again")
