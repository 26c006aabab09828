"""What a call of a model reads and computes: the little that costs and memory follow from.

Made from a bundle here; from a config, a checkpoint or heads by the exporter, which this package does not know.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specexport.runtime.bundle import TARGET_GRAPH, Bundle, inside
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.drafters.ngram import NgramDrafter
from specexport.runtime.drafters.recycling import RecyclingDrafter
from specexport.runtime.drafters.suffix import SuffixDrafter
from specexport.runtime.initializers import DTYPE_NAMES, Initializer, draft_matrices, initializers, matrices
from specexport.runtime.manifest import DrafterInfo, TargetInfo

#: Bits of an element in memory, scales of blocks included (fp16 scales for 32 elements; nvfp4: 8 bits for 16).
PRECISION_BITS = {"fp32": 32.0, "fp16": 16.0, "bf16": 16.0, "fp8": 8.5, "int8": 8.5, "int4": 4.5, "nvfp4": 4.5}
CACHE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16}
#: Graphs of the target: as exported, and lowered for an engine.
_TARGETS = re.compile(r"target(\.[a-z0-9]+)?\.onnx")
#: A query projection, [hidden size, heads * width of a head], or its codes.
_QUERIES = re.compile(r"layers\.\d+\.attention\.q_proj\.weight(\.codes)?")
#: Kinds of drafters that call a graph once for each token of depth, one after the other.
_STEPWISE = ("eagle1", "eagle3", "mtp", ModelDrafter.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A decoder.

    Attributes:
        heads, kv_heads, head_dim, hidden_size, intermediate_size, vocab_size: as in its config.
        windows: sliding window of each layer, None for full attention.
        block_elements, block_bytes, precision: of the matrices in its layers, their scales included.
        head_elements, head_bytes, head_precision: of the output projection.
        stored_bytes: of all its weights in memory (an untied embedding is not read by a call).
        cache: precision of the cache, a key of :data:`CACHE_BITS`; the others are keys of :data:`PRECISION_BITS`.
        positions: context it was trained for. kernels: our own kernels run it.
    """

    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    windows: tuple[int | None, ...]
    block_elements: int
    block_bytes: int
    precision: str
    head_elements: int
    head_bytes: int
    head_precision: str
    stored_bytes: int
    cache: str
    positions: int
    kernels: bool = False

    @property
    def weight_bytes(self) -> int:
        """Read by a call."""
        return self.block_bytes + self.head_bytes

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def row_bytes(self) -> int:
        """Of one token in all caches."""
        return 2 * self.layers * self.kv_heads * self.head_dim * CACHE_BITS[self.cache] // 8

    def attended(self, used: int) -> int:
        """Rows that one node attends to, over all layers, behind ``used`` rows."""
        return sum(used if window is None else min(used, window) for window in self.windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSize:
    """A drafter.

    Attributes:
        name: here. kind: what implements it. steps: calls of its matrices for one proposal; 0 for a lookup, which is
            free. depth: tokens deep that a proposal can be. ranks: candidates of each node; 1: chains.
            nodes: most that it drafts, 0: any number.
        elements, weight_bytes: of the matrices of one call. stored_bytes: in memory, beyond what the target has.
        cache_row_bytes: of a token in its own cache. layers: launched in a call. precision: of its weights.
        kernels: our own kernels run it. grown: one operator grows its tree, so its matrices stay in the processor's
            cache from depth to depth, as far as they fit. agreement: how often its first choice was right on held-out
            text, by depth, as its trainer noted; empty where nobody did.
    """

    name: str
    kind: str
    steps: int
    depth: int
    ranks: int
    nodes: int = 0
    elements: int = 0
    weight_bytes: int = 0
    stored_bytes: int = 0
    cache_row_bytes: int = 0
    layers: int = 0
    precision: str = "fp32"
    kernels: bool = False
    grown: bool = False
    agreement: tuple[float, ...] = ()

    def widths(self, offered: Sequence[int]) -> list[int]:
        """Those of the ``offered`` T that it can fill: up to the first that holds all it drafts."""
        if not self.nodes:
            return list(offered)
        enough = next((width for width in offered if width > self.nodes), offered[-1])
        return [width for width in offered if width <= enough]

    def as_chain(self) -> DraftSize:
        """The same drafter where no branching tree is verified, only the best path of each."""
        return replace(self, ranks=1, nodes=min(self.nodes or self.depth, self.depth))

    @property
    def copies(self) -> bool:
        """It copies an earlier text, and goes on with that where it was right."""
        return self.kind in (NgramDrafter.name, SuffixDrafter.name)

    @property
    def stepwise(self) -> bool:
        """Each further token of depth costs another call."""
        return self.kind in _STEPWISE


def lookup_size(name: str) -> DraftSize:
    """A drafter without weights. Only Token Recycling branches (the figures are its defaults)."""
    if name == RecyclingDrafter.name:
        return DraftSize(name=name, kind=name, steps=0, depth=6, ranks=8, nodes=20)
    return DraftSize(name=name, kind=name, steps=0, depth=16, ranks=1)


def decoder_size(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    hidden_size: int,
    intermediate_size: int,
    vocab_size: int,
    windows: Sequence[int | None],
    tied: bool,
    precision: str,
    cache: str,
    positions: int,
) -> ModelSize:
    """A gated decoder (Llama's shape, which all supported architectures share) from its dimensions alone."""
    attention = hidden_size * head_dim * (2 * heads + 2 * kv_heads)
    blocks = len(windows) * (attention + 3 * hidden_size * intermediate_size)
    table = vocab_size * hidden_size
    # Of quantised models the tables are in 8 bits, as builds have them.
    table_precision = precision if precision in CACHE_BITS else "int8"
    table_bytes = int(table * PRECISION_BITS[table_precision] / 8)
    block_bytes = int(blocks * PRECISION_BITS[precision] / 8)
    return ModelSize(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        windows=tuple(windows),
        block_elements=blocks,
        block_bytes=block_bytes,
        precision=precision,
        head_elements=table,
        head_bytes=table_bytes,
        head_precision=table_precision,
        stored_bytes=block_bytes + table_bytes * (1 if tied else 2),
        cache=cache,
        positions=positions,
    )


def bundle_size(bundle: Bundle) -> ModelSize:
    """The target of a bundle, from its manifest and the shapes in its graphs."""
    graphs = [name for name in bundle.manifest.files if _TARGETS.fullmatch(name)]
    stored = [sum(each.bytes for each in initializers(inside(bundle.path, name))) for name in graphs]
    return graph_size(bundle.manifest.target, initializers(inside(bundle.path, TARGET_GRAPH)), max(stored))


def graph_size(target: TargetInfo, tensors: Sequence[Initializer], stored_bytes: int) -> ModelSize:
    """A decoder from the initialisers of its graph.

    Args:
        stored_bytes: of the weights that its engine holds.
    """
    table = target.vocab_size * target.hidden_size
    tables = [tensor for tensor in tensors if tensor.elements == table]
    rest = [tensor for tensor in tensors if tensor.elements != table and not tensor.name.startswith("rope_")]
    rest = [tensor for tensor in rest if target.vocab_size not in tensor.shape]  # scales of the tables
    elements = sum(tensor.elements for tensor in matrices(rest, target.hidden_size))
    heads = _query_heads(target, rest)
    attention = target.layers * target.hidden_size * target.head_dim * (2 * heads + 2 * target.kv_heads)
    return ModelSize(
        heads=heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        hidden_size=target.hidden_size,
        intermediate_size=max(0, elements - attention) // (3 * target.hidden_size * target.layers),
        vocab_size=target.vocab_size,
        windows=target.windows,
        block_elements=elements,
        block_bytes=sum(tensor.bytes for tensor in rest),
        precision=target.precision.weights,
        head_elements=table,
        head_bytes=min((tensor.bytes for tensor in tables), default=0),
        head_precision=target.precision.lm_head,
        stored_bytes=stored_bytes,
        cache=target.precision.activations,
        positions=target.slots,
    )


def _query_heads(target: TargetInfo, tensors: Sequence[Initializer]) -> int:
    """Those that the first query projection makes; where none has that name, as many as fill the hidden size."""
    for tensor in tensors:
        if _QUERIES.fullmatch(tensor.name) and tensor.shape[-1] % target.head_dim == 0:
            return tensor.shape[-1] // target.head_dim
    return max(target.kv_heads, target.hidden_size // target.head_dim)


def drafter_size(bundle: Bundle, info: DrafterInfo) -> DraftSize:
    """A drafter that a bundle offers."""
    if info.graph is None:
        return lookup_size(info.name)
    options = info.options
    tensors = initializers(inside(bundle.path, info.graph))
    read = draft_matrices(tensors)
    # Tables that the graph shares with the target lie in the target's file and take no memory of their own.
    own = [tensor for tensor in tensors if not (tensor.location or "").startswith(TARGET_GRAPH)]
    depth = int(options.get("depth") or options.get("heads") or 1)
    ranks = 1 if info.kind == ModelDrafter.kind else int(options.get("k") or 8)
    if info.tree is not None:
        ranks = 1 + max((rank for path in info.tree for rank in path), default=0)
    cached = int(options.get("cache_bytes") or 0) // max(1, int(options.get("slots") or 1))
    return DraftSize(
        name=info.name,
        kind=info.kind,
        steps=depth if info.kind in _STEPWISE else 1,
        depth=depth,
        ranks=ranks,
        nodes=len(info.tree) if info.tree is not None else int(options.get("nodes") or 0),
        elements=sum(tensor.elements for tensor in read),
        weight_bytes=sum(tensor.bytes for tensor in read),
        stored_bytes=sum(tensor.bytes for tensor in own),
        cache_row_bytes=cached,
        layers=max(1, len(read) // 7),
        precision=_precision(read) or bundle.manifest.target.precision.weights,
        agreement=info.agreement,
    )


def _precision(tensors: Sequence[Initializer]) -> str | None:
    """Of most elements."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        name = DTYPE_NAMES.get(tensor.dtype)
        if name is not None:
            counts[name] = counts.get(name, 0) + tensor.elements
    return max(counts, key=lambda name: counts[name], default=None)
