"""``rejection`` acceptance: lossless in distribution for drafts that were *drawn* from a known q.

A draft x is taken with chance min(1, p(x) / q(x)); otherwise a token is drawn from what p has over q, ``max(0, p - q)``
(Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318). Siblings that were drawn without
replacement are tried in the order of their drawing: after a refusal p becomes that residual, and q loses the sibling
(SpecInfer, Miao et al. 2023, arXiv 2305.09781; EAGLE, Li et al. 2024, arXiv 2401.15077).
A chain may also be judged as one block (Sun et al. 2024, arXiv 2403.10444), which accepts more.

The output follows p only if q is exactly what was sampled: float64, after the drafter's own processors, nothing chosen
by looking at what was drawn. Ranking by q and keeping the best is not sampling; such trees go through ``match``. All
rows are float64 [V] that sum to 1. Randomness comes from a :class:`Chance`, so that a test can enumerate it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specexport.runtime import gumbel
from specexport.runtime.acceptance import Accepted, RowOf, Stop, match, walk
from specexport.runtime.sampling import Sampler
from specexport.runtime.summary import Row as TargetRow
from specexport.runtime.tree import Tree

Row = NDArray[np.float64]
#: A sum of V float64 chances differs from 1 by less; float32 or half precision rows do not.
_SUM_ERROR = 1e-9


class Chance(Protocol):
    """A source of independent random decisions."""

    def happens(self, probability: float) -> bool:
        """True with this probability (1 or more: always)."""
        ...

    def draw(self, weights: Row) -> int:
        """An index, with a probability in proportion to its weight."""
        ...


class Uniforms:
    """Decisions from uniforms keyed by (seed, position of the root), numbered as they are used.

    Every step has a root of its own, so no number is used twice; none is the one behind a token's noise
    (:func:`specexport.runtime.gumbel.uniform`), so drafts that were drawn with the noise are independent of them.
    """

    def __init__(self, seed: int, position: int) -> None:
        self._key = gumbel.position_key(seed, position)
        self._used = 0

    def _next(self) -> float:
        self._used += 1
        return gumbel.uniform(self._key, self._used - 1)

    def happens(self, probability: float) -> bool:
        """See :class:`Chance`."""
        return self._next() < probability

    def draw(self, weights: Row) -> int:
        """See :class:`Chance`: the inverse of the cumulated weights."""
        mass = np.cumsum(weights)
        index = int(np.searchsorted(mass, self._next() * mass[-1], side="right"))
        return index if index < len(mass) else int(np.flatnonzero(weights)[-1])  # u * mass rounded up to the mass


def residual(p: Row, q: Row) -> Row:
    """What is left of p after a draft from q was refused: ``max(0, p - q)``, scaled to 1."""
    left = np.maximum(p - q, 0)
    total = float(left.sum())
    # p equals q to the last bit: then refusal has no chance but that of a rounding, and p is as good.
    return left / total if total > 0 else p


def reject_siblings(p: Row, q: Row, drafted: Sequence[int], chance: Chance) -> tuple[int | None, int]:
    """Judge the children of one node.

    Args:
        p, q: the target's and the drafter's distribution after the node. q is not looked at if nothing was drafted.
        drafted: tokens drawn from q, in order, without replacement.

    Returns:
        (which of ``drafted`` was taken, or None; the token to emit).

    Raises:
        ValueError: q is no distribution of this vocabulary in float64, or gives a drafted token no chance.
    """
    if len(drafted):
        _check(p, q)
    for number, token in enumerate(drafted):
        if q[token] <= 0:
            raise ValueError(f"token {token} was drafted, but its q is {q[token]}: it was not drawn from q")
        if chance.happens(p[token] / q[token]):
            return number, token
        p = residual(p, q)
        if number + 1 < len(drafted):
            q = q.copy()
            q[token] = 0
            q /= max(float(q.sum()), np.finfo(np.float64).tiny)
    return None, chance.draw(p)


def reject_chain(p: Sequence[Row], q: Sequence[Row], drafted: Sequence[int], chance: Chance) -> tuple[int, int]:
    """Judge a chain token by token.

    Args:
        p: g + 1 rows of the target: ``p[i]`` follows i accepted drafts. q: g rows, ``q[i]`` is what draft i was drawn
            from. drafted: g tokens.

    Returns:
        (how many drafts were taken, the token after them).
    """
    for number, token in enumerate(drafted):
        taken, other = reject_siblings(p[number], q[number], [token], chance)
        if taken is None:
            return number, other
    return len(drafted), chance.draw(p[len(drafted)])


def reject_tree(
    tree: Tree, p_of: Callable[[int], Row], q_of: Callable[[int], Row], chance: Chance
) -> tuple[list[int], int]:
    """Judge a tree from the root down, siblings in order.

    Args:
        tree: of tokens drawn as :attr:`~specexport.runtime.tree.Tree.draft_probs` says.
        p_of, q_of: rows of a node, asked for the nodes of the path alone.

    Returns:
        (the path of accepted nodes, the root first; the token after it).
    """
    path = [0]
    judge = _judge(tree, q_of, chance)
    while True:
        token, child = judge(path[-1], p_of(path[-1]))
        if child is None:
            return path, token
        path.append(child)


def verify_block(p: Sequence[Row], q: Sequence[Row], drafted: Sequence[int], chance: Chance) -> tuple[int, int]:
    """Judge a chain as a whole; arguments and result are those of :func:`reject_chain`.

    The longest accepted prefix counts, whatever was decided about shorter ones, so a draft that p likes less can be
    carried by what follows it. In expectation no lossless rule for one chain takes more.

    What was taken depends on all drafts, also on those not taken, so drafts after the next root must be drawn with
    fresh randomness: a drafter that draws with noise keyed by position alone would draw the refused ones again. For
    the same reason the length of the chain must not depend on the tokens in it.
    """
    taken, weight, kept = 0, 1.0, 1.0  # kept: the weight where the last prefix was accepted
    for number, token in enumerate(drafted):
        _check(p[number], q[number])
        if q[number][token] <= 0:
            raise ValueError(f"token {token} was drafted, but its q is {q[number][token]}: it was not drawn from q")
        weight = min(1.0, weight * p[number][token] / q[number][token])
        if number + 1 < len(drafted):
            left = float(np.maximum(weight * p[number + 1] - q[number + 1], 0).sum())
            accepts = left / (left + 1 - weight) if weight < 1 else 1.0
        else:
            accepts = weight
        if chance.happens(accepts):
            taken, kept = number + 1, weight
    if taken == len(drafted):
        return taken, chance.draw(p[taken])
    left_over = np.maximum(kept * p[taken] - q[taken], 0)
    return taken, chance.draw(left_over if left_over.any() else p[taken])


def rejection(
    tree: Tree,
    row_of: RowOf,
    sampler: Sampler,
    position: int,
    *,
    limit: int | None = None,
    stop: Stop | None = None,
) -> Accepted:
    """:func:`reject_tree` on the sampler's distribution, with its seed; see
    :class:`~specexport.runtime.acceptance.Acceptor`. Lossless in distribution, reproducible by the seed.

    At temperature 0 p is a single token and every rule is ``match``.

    Raises:
        ValueError: the tree has drafts but no ``draft_probs``, or they are not what was drawn from.
    """
    if sampler.params.temperature == 0:
        return match(tree, row_of, sampler, position, limit=limit, stop=stop)
    if tree.draft_probs is None and len(tree) > 1:
        raise ValueError("the tree was not drawn from known probabilities (draft_probs)")
    judge = _judge(tree, tree.draft_probs, Uniforms(sampler.params.seed, position))

    def choose(node: int, row: TargetRow, place: int) -> tuple[int, int | None]:
        return judge(node, sampler.probs(row, place))

    return walk(choose, row_of, sampler, position, limit, stop)


def _judge(
    tree: Tree, q_of: Callable[[int], Row] | None, chance: Chance
) -> Callable[[int, Row], tuple[int, int | None]]:
    """A function of (node, p) to (token, the child that carries it or None)."""
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()

    def judge(node: int, p: Row) -> tuple[int, int | None]:
        children = [child for child in range(node + 1, len(parents)) if parents[child] == node]
        if not children or q_of is None:
            return chance.draw(p), None
        taken, token = reject_siblings(p, q_of(node), [tokens[child] for child in children], chance)
        return token, None if taken is None else children[taken]

    return judge


def _check(p: Row, q: Row) -> None:
    if q.dtype != np.float64 or q.shape != p.shape or not abs(float(q.sum()) - 1) <= _SUM_ERROR or q.min() < 0:
        raise ValueError(
            f"q must be float64 {list(p.shape)} chances that sum to 1, as they were sampled; got {q.dtype} "
            f"{list(q.shape)} with sum {float(q.sum())}"
        )
