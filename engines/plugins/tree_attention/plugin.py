"""The operator as a TensorRT plugin in Python, for ``tensorrt`` and ``tensorrt_rtx``: to compile graphs that hold it.

A plan that is to run elsewhere wants the C++ plugin of ``tensorrt/`` instead, which does without Python. This one needs
no compiler and no device to build with; with a library of the kernels it runs, too.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from specexport.engines.plugins.tree_attention import INPUTS, OPERATOR, OUTPUTS, VERSION
from specexport.engines.plugins.tree_attention.library import Call, Library, workspace_bytes
from specexport.runtime.errors import UsageError

#: Which input each output shares its memory with; -1: none.
ALIASES = {"output": -1, "present_k": INPUTS.index("past_k"), "present_v": INPUTS.index("past_v")}
_ELEMENTS = INPUTS[: INPUTS.index("tree")]


def register(trt: ModuleType, library: Path | None = None) -> None:
    """Make the operator known to a TensorRT module's plugin registry; a second call changes nothing.

    A builder configuration also needs ``PreviewFeature.ALIASED_PLUGIN_IO_10_03``. With ``tensorrt_rtx`` an unversioned
    ``libtensorrt_rtx.so`` must be on the library path, or the process ends at the first plugin.

    Args:
        trt: ``tensorrt`` (10.3 or later) or ``tensorrt_rtx``.
        library: the kernels, built by ``toolchain.build_device``; without, plans can be built and not run.

    Raises:
        UsageError: this TensorRT has no plugins that write to their inputs.
    """
    if not hasattr(trt, "IPluginV3OneBuildV2"):
        raise UsageError(f"{trt.__name__} {trt.__version__} has no IPluginV3OneBuildV2: 10.3 or later is needed")
    registry = trt.get_plugin_registry()
    if OPERATOR not in (creator.name for creator in registry.all_creators):
        creator = _make_creator(trt, None if library is None else Library(library))
        registry.register_creator(creator, "")
        _REGISTERED.append(creator)


#: The registry keeps no reference of its own.
_REGISTERED: list[Any] = []


def _make_creator(trt: Any, library: Library | None) -> Any:
    """A creator of plugins; the classes exist once a module, because they derive from its own."""

    class Plugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime):  # type: ignore[misc]
        def __init__(self, scale: float, window: int) -> None:
            for base in (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime):
                base.__init__(self)
            self.plugin_name, self.plugin_version, self.plugin_namespace = OPERATOR, VERSION, ""
            self.num_outputs = len(OUTPUTS)
            self.scale, self.window = scale, window

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def clone(self) -> Any:
            copy = Plugin(self.scale, self.window)
            copy.__dict__.update(self.__dict__)
            return copy

        def get_fields_to_serialize(self) -> Any:
            fields = [
                trt.PluginField("scale", np.array([self.scale], np.float32), trt.PluginFieldType.FLOAT32),
                trt.PluginField("window", np.array([self.window], np.int32), trt.PluginFieldType.INT32),
            ]
            return trt.PluginFieldCollection(fields)

        def get_output_data_types(self, inputs: Any) -> Any:
            return [inputs[0]] * len(OUTPUTS)

        def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> Any:
            return [trt.DimsExprs(inputs[max(ALIASES[name], 0)]) for name in OUTPUTS]

        def get_aliased_input(self, index: int) -> int:
            return ALIASES[OUTPUTS[index]]

        def supports_format_combination(self, place: int, tensors: Any, inputs: int) -> bool:
            tensor, first = tensors[place].desc, tensors[0].desc
            if tensor.format != trt.TensorFormat.LINEAR:
                return False
            if place == 0:
                return tensor.type in (trt.DataType.HALF, trt.DataType.BF16)
            element = place < len(_ELEMENTS) or place >= len(INPUTS)
            return bool(tensor.type == (first.type if element else trt.DataType.INT32))

        def configure_plugin(self, inputs: Any, outputs: Any) -> None: ...

        def on_shape_change(self, inputs: Any, outputs: Any) -> None: ...

        def set_tactic(self, tactic: int) -> None: ...

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

        def get_workspace_size(self, inputs: Any, outputs: Any) -> int:
            query, cache = inputs[0].max, inputs[INPUTS.index("past_k")].max
            return workspace_bytes(query[2], query[1], cache[1], query[3], cache[2])

        def enqueue(
            self, inputs: Any, outputs: Any, input_places: Any, output_places: Any, workspace: int, stream: int
        ) -> None:
            if library is None:
                raise UsageError(f"{OPERATOR} was registered without a library of its kernels: it only compiles")
            place = dict(zip(INPUTS, input_places, strict=True))
            query, cache = inputs[0].dims, inputs[INPUTS.index("past_k")].dims
            call = Call(
                nodes=query[2],
                heads=query[1],
                kv_heads=cache[1],
                head_dim=query[3],
                slots=cache[2],
                committed=inputs[INPUTS.index("commit")].dims[0],
                window=self.window,
                element=int(inputs[0].type == trt.DataType.BF16),
                scale=self.scale,
                cache_k=place.pop("past_k"),
                cache_v=place.pop("past_v"),
                output=output_places[0],
                workspace=workspace,
                **place,
            )
            call.workspace_bytes = library.workspace(call)
            library.enqueue(call, stream)

    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = OPERATOR, VERSION, ""
            nothing = np.array([])
            self.field_names = trt.PluginFieldCollection(
                [
                    trt.PluginField("scale", nothing, trt.PluginFieldType.FLOAT32),
                    trt.PluginField("window", nothing, trt.PluginFieldType.INT32),
                ]
            )

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            given = {field.name: field.data.item() for field in fields if field.data.size == 1}
            return Plugin(float(given["scale"]), int(given["window"]))

    return Creator()
