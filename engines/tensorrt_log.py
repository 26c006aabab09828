"""What the build log of a plan says: the compiled layers, and what became of attention and of cache updates.

The verbose log ends in one message, ``Layers:``, with a line for each compiled layer of each profile: its name, inputs,
outputs and the ONNX nodes it came from. Without a GPU that is the only inspector, since a plan cannot be loaded. The
layers of a profile follow those of the one before; each but the first marks its tensors: ``present_k.0 [profile 3]``.
Of a plan for several capabilities one is listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: In the name of a layer that attends in one kernel (``_gemm_mha_v2``, ``_gemv_mha_v1``), or its type if a plugin.
_FUSED, _PLUGIN = "mha", "plugin"
_LAYER = re.compile(r"(?:\[[A-Z_]+\] )?Name: (?P<name>.*?), LayerType: (?P<kind>\w+), (?P<rest>.*)")
#: ``Location`` where a layer is not of the compiler's own making, such as a plugin.
_TENSOR = re.compile(r"Name: ([^,]+?)(?: \[profile \d+\])?, (?:Location: \w+, )?Dimensions: ")
_NODE = re.compile(r"\[ONNX Layer: ([^\]]+?)(?: \[profile \d+\])?\]")
_PROFILE = re.compile(r"\[profile (\d+)\]")
_MESSAGE = re.compile(r"\[(?P<severity>[A-Z_]+)\] (?P<text>.*)")
#: Longest part of a message that an error repeats.
_SHOWN = 400


@dataclass(frozen=True, slots=True)
class Layer:
    """A compiled layer of a profile: names of inputs and outputs, and the ONNX nodes it does the work of."""

    profile: int
    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[str, ...]

    @property
    def is_plugin(self) -> bool:
        """Whether a plugin computes it."""
        return _PLUGIN in self.kind.lower()


@dataclass(frozen=True, slots=True)
class Fusion:
    """What became of the nodes that have to be fused.

    Attributes:
        attention: nodes that one kernel (or the plugin) computes in every profile. caches: outputs that are updated in
            the memory of their input.
        reasons: for each other one, by node or output, what was found instead.
    """

    attention: tuple[str, ...]
    caches: tuple[str, ...]
    reasons: Mapping[str, str]


def read_layers(lines: Iterable[str]) -> Iterator[Layer]:
    """The compiled layers that a log lists; none where it has no list."""
    listing, profile = False, 0
    for line in lines:
        if line.rstrip().endswith("] Layers:") or line.startswith("Layers:"):
            listing = True
            continue
        if not listing or (match := _LAYER.match(line)) is None:
            continue
        profile = max(profile, *map(int, _PROFILE.findall(line)), 0)
        tensors, _, metadata = match["rest"].rpartition(", Metadata: ")
        before, _, after = tensors.partition("Outputs: [")
        inputs, outputs = before.partition("Constants: [")[0], after.partition("}]")[0]
        yield Layer(
            profile,
            match["name"],
            match["kind"],
            tuple(_TENSOR.findall(inputs)),
            tuple(_TENSOR.findall(outputs)),
            tuple(_NODE.findall(metadata)),
        )


def check_fusion(layers: Iterable[Layer], attention: Sequence[str], caches: Mapping[str, str], profiles: int) -> Fusion:
    """Look up attention nodes and cache updates among the layers.

    Args:
        attention: names of the nodes. caches: output -> input. profiles: each compiles the graph once.
    """
    fused: dict[str, set[int]] = {name: set() for name in attention}
    seen: dict[str, list[str]] = {name: [] for name in attention}
    written: dict[str, set[int]] = {output: set() for output in caches}
    apart = set()
    for layer in layers:
        for output, source in caches.items():
            if output in layer.outputs:
                written[output].add(layer.profile)
            if source in layer.outputs or (
                source in layer.inputs and not (layer.is_plugin and output in layer.outputs)
            ):
                apart.add(output)
        for node in seen.keys() & set(layer.nodes):
            seen[node].append(layer.name)
            if layer.is_plugin or _FUSED in layer.name.lower():
                fused[node].add(layer.profile)
    reasons = {}
    for name, found in seen.items():
        if (count := len(fused[name])) < profiles:
            where = f"{count} of {profiles} profiles have its kernel" if count else "no kernel is its own"
            reasons[name] = f"{where}; its layers are {', '.join(found[:3]) or 'not in the log'}"
    in_place = []
    for output, source in caches.items():
        if output in apart:
            reasons[output] = f"{source} is read apart from {output}: the cache is copied"
        elif not written[output]:
            reasons[output] = "no layer writes it"
        elif (count := len(written[output])) < profiles:
            reasons[output] = f"{count} of {profiles} profiles write it"
        else:
            in_place.append(output)
    return Fusion(tuple(name for name in attention if name not in reasons), tuple(in_place), reasons)


def first_error(path: Path) -> str:
    """The first error of a log, shortened to a line; that of its end where it has none."""
    last = "no reason given"
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if (match := _MESSAGE.match(line)) is None:
                continue
            if match["severity"] in ("ERROR", "INTERNAL_ERROR"):
                return match["text"].strip()[:_SHOWN]
            last = match["text"].strip()[:_SHOWN] or last
    return last
