"""What the heads of an untuned bundle are expected to cost and to bring, before one was asked.

What a draft reads stands in the headers of the graphs; how often it is right in the bundle's acceptance tables (``train
calibrate``) or in its manifest, for heads that were trained here. All of it is a guess that some tens of steps replace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from specexport.runtime.bundle import TARGET_GRAPH, Bundle, inside
from specexport.runtime.costs import NODE_SHARE, ROW_SHARE, DraftShare, node_share
from specexport.runtime.device_profile import read_acceptance
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.errors import BundleError
from specexport.runtime.initializers import draft_matrices, initializers, is_lm_head
from specexport.runtime.worth import Prior

#: How far the share of a draft by the bytes it reads is off, as a share of itself (seen on x86 CPUs: a half at most).
_SPREAD = 0.5
#: Bytes that a machine reads in the time of the small operators of a head's call, and of those of a step (seen there:
#: EAGLE-3 beside fp32, int8 and int4 targets on our kernels, all within a fifth).
_CALL_BYTES, _STEP_BYTES = 8e6, 16e6
#: The first of these where one operator grows the tree, each depth; of the matrices it reads again what the processor's
#: cache does not hold, of the size of which this is a cautious guess.
_GROWN_BYTES, CACHED_BYTES = 6e6, 16e6
#: Bytes that a machine reads in the time of one product of a row that the drafter catches up with (seen there too).
_ROW_BYTES = 0.06
#: A share is never less: launching a graph takes time as well.
_LEAST_DRAFT, _LEAST_ROW = 0.02, 0.0001


#: Whether the tree of a drafter's graph grows in one operator, such as :func:`specexport.runtime.engine.grows_trees`.
Grown = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Expected:
    """What a session begins with that nobody tuned.

    Attributes:
        node_share, row_share, draft_shares: see :class:`~specexport.runtime.costs.LearnedCosts`. priors: what drafters
            add to plain decoding.
    """

    node_share: float = NODE_SHARE
    row_share: float = ROW_SHARE
    draft_shares: dict[str, DraftShare] = field(default_factory=dict)
    priors: dict[str, Prior] = field(default_factory=dict)

    @staticmethod
    def of(bundle: Bundle, *, kernels: bool, grown: Grown) -> Expected:
        """By what a bundle says.

        Args:
            kernels: our own run the target.

        Raises:
            BundleError: a graph that is no ONNX file.
        """
        share = node_share(bundle.manifest.target.precision.weights, kernels=kernels)
        drafts = draft_shares(bundle, grown)
        return Expected(share, row_share(bundle), drafts, trained_priors(bundle, drafts, share))


def draft_shares(bundle: Bundle, grown: Grown = lambda _: False) -> dict[str, DraftShare]:
    """What a proposal of each drafter with a graph costs by the bytes it reads, of those that a step reads.

    Args:
        grown: of the file of a graph.

    Raises:
        BundleError: a graph that is no ONNX file.
    """
    step = _step_bytes(bundle)
    shares = {}
    for info in bundle.manifest.drafters:
        if info.graph is None:
            continue
        read = draft_matrices(initializers(inside(bundle.path, info.graph)))
        # A recurrent head calls its matrices once a depth; Medusa's are all called once, a draft model's once a token.
        calls = info.depth if "depth" in info.options and info.kind != ModelDrafter.kind else 1
        products = sum(tensor.elements for tensor in read if not is_lm_head(tensor))
        whole = sum(tensor.bytes for tensor in read)
        if grown(info.graph):
            draft = whole + calls * _GROWN_BYTES + (calls - 1) * max(0.0, whole - CACHED_BYTES)
        else:
            draft = calls * (_CALL_BYTES + whole)
        shares[info.name] = DraftShare(
            draft=max(_LEAST_DRAFT, draft / step),
            row=max(_LEAST_ROW, _ROW_BYTES * products / step),
            spread=_SPREAD,
        )
    return shares


def row_share(bundle: Bundle) -> float:
    """What a thousand rows in use add to a step, by the bytes that it reads of them."""
    target = bundle.manifest.target
    rows = sum(1000 if window is None else min(window, 1000) for window in target.windows or (None,) * target.layers)
    value = 4 if target.precision.activations == "fp32" else 2
    return 2 * target.kv_heads * target.head_dim * value * rows / _step_bytes(bundle)


def _step_bytes(bundle: Bundle) -> float:
    files = bundle.manifest.files
    return _STEP_BYTES + sum(files[name].bytes for name in (TARGET_GRAPH, f"{TARGET_GRAPH}.data") if name in files)


def trained_priors(bundle: Bundle, shares: dict[str, DraftShare], node_share: float) -> dict[str, Prior]:
    """What drafters add to plain decoding as chains of the best length, as far as the bundle says how often they are
    right; acceptance that was counted on it goes before what training noted.

    Args:
        node_share: what a further node costs, see :data:`~specexport.runtime.costs.NODE_SHARES`.
    """
    try:
        counted = read_acceptance(bundle)
    except BundleError:  # as with profiles: what is no use must not stop a session
        counted = None
    priors = {}
    for info in bundle.manifest.drafters:
        table = counted.drafters.get(info.name) if counted else None
        right = info.agreement if table is None else table.top1
        share = shares.get(info.name)
        if share is None or not right:
            continue
        calls = range(1, len(right) + 1) if info.kind == ModelDrafter.kind else [1] * len(right)
        chains = [
            Prior(more, call * share.draft + node_share * length)
            for length, (call, more) in enumerate(zip(calls, accumulate(accumulate(right, mul)), strict=True), 1)
        ]
        priors[info.name] = max(chains, key=lambda prior: prior.rate)
    return priors
