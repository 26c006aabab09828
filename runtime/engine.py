"""What a session needs from an engine, and how an engine is found.

Engines live in packages that depend on this one, so they are looked up by entry point (group ``specexport.engines``)
and never imported from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.cache import CacheRows
from specexport.runtime.errors import UsageError
from specexport.runtime.manifest import PrecisionInfo
from specexport.runtime.summary import Row
from specexport.runtime.tree import Tree

ENTRY_POINT_GROUP = "specexport.engines"


class Graph(Protocol):
    """A drafter's graph. Its caches, if it has any, belong to it: they start at zero and are updated in place."""

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Outputs by name, from the inputs other than caches."""
        ...


class Step(NamedTuple):
    """One call of a target (see :mod:`specexport.runtime.contract`).

    Attributes:
        tokens: int64 [T]. positions: int64 [T]. tree: bool [T, T].
        past: committed rows after this call's commit. write: row where the block starts.
        commit: int64 [past - write], cache rows to move to ``write ..``, in path order; often empty.
        select: int64 [R], nodes that need logits.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    tree: NDArray[np.bool_]
    past: int
    write: int
    commit: NDArray[np.int64]
    select: NDArray[np.int64]

    @staticmethod
    def of(tree: Tree, rows: CacheRows, select: Sequence[int] | None = None) -> Step:
        """A tree after the committed ``rows``; every node's logits unless ``select`` names some."""
        past, wanted = rows.past, np.arange(len(tree)) if select is None else np.array(select, np.int64)
        return Step(tree.tokens, past + tree.depths(), tree.mask(), past, rows.write, rows.commit_array, wanted)

    @staticmethod
    def chain(tokens: Sequence[int] | NDArray[np.int64], past: int = 0, select: Sequence[int] | None = None) -> Step:
        """Tokens of a text after ``past`` others that are in place."""
        return Step.of(Tree.chain(np.array(tokens, np.int64)), CacheRows(past), select)


class TargetEngine(Protocol):
    """One loaded target with its caches. Not thread safe; one sequence at a time.

    Attributes:
        slots: S, rows that may hold tokens. vocab_size: V, width of a row of logits.
        features_size: F, 0 when the graph has no features.

    An engine whose rows of logits depend on how many rows a call has says so by an attribute ``width_exact = False``
    (see :func:`width_exact`): speculation may then take another token where two are nearly tied.
    """

    slots: int
    vocab_size: int
    features_size: int

    def run(self, step: Step) -> NDArray[np.float32]:
        """One call of the target.

        Returns:
            float32 [R, V], a view that the next call overwrites.
        """
        ...

    def features(self) -> NDArray[Any]:
        """[T, F] of the last call, a view that the next call overwrites; only where ``features_size`` is not 0."""
        ...

    def open_graph(self, name: str) -> Graph:
        """Another graph of the bundle (a drafter), on the same device and threads."""
        ...

    def open_target(self, name: str) -> TargetEngine:
        """Another target of the bundle (a draft model) with caches of its own, on the same device and threads."""
        ...

    def reset(self) -> None:
        """Zero the caches."""
        ...

    def read_cache(self, rows: int) -> list[NDArray[Any]]:
        """Copies of the first ``rows`` rows of every cache tensor, [Hkv, rows, D], k then v of each layer."""
        ...


@runtime_checkable
class SummarisingEngine(TargetEngine, Protocol):
    """An engine whose logits stay on a device: what decodes asks for rows that are fetched when they are needed."""

    def run_rows(self, step: Step) -> Sequence[Row]:
        """As :meth:`TargetEngine.run`, but [R] rows, which the next call makes worthless."""
        ...


@runtime_checkable
class StaticEngine(TargetEngine, Protocol):
    """An engine that drafts are cut for: it is compiled for certain widths, or some steps would change its sums. Chains
    of any length run on it, in pieces if need be; a branching tree in one."""

    def widest(self, past: int) -> int:
        """Most nodes of a tree after ``past`` committed rows, at least 1 while a row is free."""
        ...


def widest_of(engine: TargetEngine) -> Callable[[int], int]:
    """A function of the committed rows: most nodes of a tree that ``engine`` takes after them."""
    return engine.widest if isinstance(engine, StaticEngine) else lambda past: engine.slots - past


def width_exact(engine: TargetEngine) -> bool:
    """Whether an engine promises that a row of logits does not depend on how many rows its call has."""
    return bool(getattr(engine, "width_exact", True))


def tree_exact(engine: TargetEngine) -> bool:
    """Whether an engine promises of a branching tree too that its rows are, bit for bit, plain decoding's."""
    return bool(getattr(engine, "tree_exact", False))


def grows_trees(engine: TargetEngine, graph: str) -> bool:
    """Whether an engine grows the whole tree of a drafter's graph in one operator, so that the drafter's matrices stay
    in the processor's cache from depth to depth."""
    ask = getattr(engine, "grows_trees", None)
    return ask is not None and bool(ask(graph))


def chains_only(precision: PrecisionInfo, engine: TargetEngine | None = None) -> bool:
    """Whether tokens are those of plain decoding only as long as no branching tree is verified.

    Columns of a branching tree add up in another order than a chain's, but for engines that promise otherwise. That is
    1e-7 in a sum, but products with codes round activations to 8 bits and make 1e-2 of it. Whoever measures or plans
    trees asks the same as who verifies them.

    Args:
        precision: of the target. engine: that runs it; None: one that promises what the bundle does.
    """
    promised = engine is None or (width_exact(engine) and not tree_exact(engine))
    return precision.quantized and precision.exact and promised


class EngineFactory(Protocol):
    """The object an entry point names."""

    def __call__(self, bundle_path: Path, *, threads: int = 0) -> TargetEngine:
        """Load the target of a bundle. ``threads`` 0 means one per physical core."""
        ...


def find_engine(name: str) -> EngineFactory:
    """The engine registered under ``name``.

    Raises:
        UsageError: no such engine is installed, and the message lists those that are; or what it needs is not.
    """
    found = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in found:
        raise UsageError(f"unknown engine {name!r}: installed engines are {', '.join(sorted(found)) or 'none'}")
    try:
        factory: EngineFactory = found[name].load()
    except ModuleNotFoundError as error:
        raise UsageError(
            f"engine {name!r} needs {error.name}: install it with \"pip install 'specexport[{name.split('-')[0]}]'\""
        ) from error
    return factory
