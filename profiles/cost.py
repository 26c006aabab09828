"""What a step costs: a roofline from a profile, a straight line from a publication, or what ``tune`` measured.

A step is one target call of T nodes a sequence, for ``batch`` sequences that have ``used`` cache rows each, and what
the host does around it. Our engines run one sequence; batches are there to say where speculation stops paying.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specexport.profiles.schema import Profile, Rates
from specexport.profiles.sizes import DraftSize, ModelSize
from specexport.runtime.device_profile import DeviceProfile, DraftCost
from specexport.runtime.expected import CACHED_BYTES

#: Largest relative error of predicted speedups: of a roofline, and of a tuned curve (measured: see README).
ROOFLINE_ERROR, TUNED_ERROR = 0.25, 0.10
#: How long it takes to read what a processor's cache holds of a drafter's matrices, of reading memory (EAGLE-3 of 14 MB
#: beside SmolLM2-135M, 2 cores of Zen 5 with 32 MiB of shared cache).
CACHED_SHARE = 0.4


class CostModel(Protocol):
    """Times in seconds. ``error``: largest relative error of a ratio of two of them. ``source``: in words."""

    @property
    def error(self) -> float: ...

    @property
    def source(self) -> str: ...

    def step_s(self, nodes: int, used: int, batch: int = 1) -> float:
        """A target call of ``nodes`` nodes a sequence, with the host's share."""
        ...

    def draft_s(self, draft: DraftSize, depth: int, used: int, batch: int = 1) -> float:
        """One proposal, ``depth`` tokens deep, of a drafter."""
        ...


@dataclass(frozen=True, slots=True)
class Roofline:
    """The larger of reading and computing, softened (Williams et al. 2009); see :class:`Efficiency` for the factors.

    Args:
        size: of the target. threads: of a CPU, None for the profile's own number; rates grow with it, bandwidth does
            up to what the profile has.
    """

    profile: Profile
    size: ModelSize
    threads: int | None = None
    error: float = ROOFLINE_ERROR

    @property
    def source(self) -> str:
        return f"roofline of {self.profile.name}"

    def step_s(self, nodes: int, used: int, batch: int = 1) -> float:
        """Every row of logits is computed, as verification needs."""
        size, rates = self.size, self.profile.rates(self.size.kernels)
        tokens = nodes * batch
        matrices = self._product_s(rates, size.block_bytes, 2 * tokens * size.block_elements, size.precision)
        matrices += self._product_s(rates, size.head_bytes, 2 * tokens * size.head_elements, size.head_precision)
        # Each node attends to the rows before the block and, on average, to half of the block.
        rows = size.attended(used) + size.layers * (nodes + 1) // 2
        pairs = 4 * size.heads * size.head_dim * tokens * rows
        read = batch * size.row_bytes * (size.attended(used) // size.layers + nodes)
        attention = self._product_s(rates, read, pairs, size.cache) / rates.efficiency.attention
        return matrices + attention + (rates.call_us + rates.layer_us * size.layers) * 1e-6

    def draft_s(self, draft: DraftSize, depth: int, used: int, batch: int = 1) -> float:
        """Calls of the drafter's matrices, one after the other; none for a lookup."""
        if not draft.steps:
            return 0.0
        rates = self.profile.rates(draft.kernels)
        steps = depth if draft.stepwise else draft.steps
        nodes = batch * (draft.ranks if draft.stepwise else 1)
        cache = batch * draft.cache_row_bytes * used
        operations = 2 * nodes * draft.elements
        call = self._product_s(rates, draft.weight_bytes + cache, operations, draft.precision)
        # An unrolled head is one call of the engine; a draft model calls once a token.
        calls = steps if draft.kind == "model" else 1
        again = call
        if draft.grown:
            held = min(draft.weight_bytes, CACHED_BYTES)
            read = draft.weight_bytes - held + CACHED_SHARE * held
            again = self._product_s(rates, read + cache, operations, draft.precision)
        matrices = call + (steps - 1) * again
        return matrices + steps * draft.layers * rates.layer_us * 1e-6 + calls * rates.call_us * 1e-6

    def _product_s(self, rates: Rates, read: float, operations: float, precision: str) -> float:
        share, threads = rates.efficiency, self.profile.threads
        scale = 1.0 if not self.threads or not threads else self.threads / threads
        memory = read / (rates.bandwidth_gb_s * 1e9 * share.bandwidth * min(1.0, scale))
        compute = operations / (rates.reached(precision) * scale)
        p = share.overlap
        top = max(memory, compute)
        return float(top * ((memory / top) ** p + (compute / top) ** p) ** (1 / p)) if top else 0.0


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A straight line in tokens and cached tokens, as publications fit to serving systems.

    Attributes:
        fixed_s, token_s, cached_s: a target call: ``fixed + token * batch * T + cached * batch * used``.
        draft_fixed_s, draft_token_s: a proposal: ``fixed + token * batch * depth``.
        host_s: around a step.
    """

    fixed_s: float
    token_s: float
    cached_s: float
    draft_fixed_s: float
    draft_token_s: float
    host_s: float
    source: str
    error: float = TUNED_ERROR

    def step_s(self, nodes: int, used: int, batch: int = 1) -> float:
        return self.host_s + self.fixed_s + batch * (self.token_s * nodes + self.cached_s * used)

    def draft_s(self, draft: DraftSize, depth: int, used: int, batch: int = 1) -> float:
        return self.draft_fixed_s + self.draft_token_s * batch * depth if draft.steps else 0.0


@dataclass(frozen=True, slots=True)
class Tuned:
    """What ``tune`` measured. For a batch the nodes of all sequences are one width, their caches are read one by one.

    Drafters that were not measured cost what the roofline says, in proportion to its own error at one node.
    """

    measured: DeviceProfile
    roofline: Roofline | None = None
    source: str = "measured on this machine"

    @property
    def error(self) -> float:
        return max(TUNED_ERROR, self.measured.cost.noise)

    def step_s(self, nodes: int, used: int, batch: int = 1) -> float:
        curve = self.measured.cost
        more = (batch - 1) * (curve.step_s(1, used) - curve.step_s(1, 0)) if batch > 1 else 0.0
        return curve.step_s(nodes * batch, used) + max(0.0, more) + self.measured.host_s

    def draft_s(self, draft: DraftSize, depth: int, used: int, batch: int = 1) -> float:
        known: DraftCost | None = self.measured.drafts.get(draft.name)
        if known is not None:
            return known.at(depth)
        if self.roofline is None or not draft.steps:
            return 0.0
        scale = self.step_s(1, used) / self.roofline.step_s(1, used)
        return scale * self.roofline.draft_s(draft, depth, used, batch)
