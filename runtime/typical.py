"""``typical`` acceptance (Medusa; Cai et al. 2024, arXiv 2401.10774): take a draft that the target finds plausible.

A draft is taken when p(x) > min(eps, alpha * exp(-H)), H the entropy of p in nats and p what the target would sample
from: after penalties, biases, temperature and truncation, with the draft's own path as history. **Lossy**: drafts are
preferred to what the target would have drawn, so the output does not follow its distribution. Never the default.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.acceptance import Accepted, RowOf, Stop, walk
from specexport.runtime.sampling import Sampler
from specexport.runtime.summary import Row
from specexport.runtime.tree import Tree

#: Medusa's values: no draft with more than EPS is refused; the flatter p, the less is asked.
EPS, ALPHA = 0.09, 0.3


def threshold(p: NDArray[np.float64], eps: float = EPS, alpha: float = ALPHA) -> float:
    """What p(x) must exceed, from the distribution p (float64 [V])."""
    held = p[p > 0]
    return min(eps, alpha * math.exp(float((held * np.log(held)).sum())))


def typical(
    tree: Tree,
    row_of: RowOf,
    sampler: Sampler,
    position: int,
    *,
    limit: int | None = None,
    stop: Stop | None = None,
    eps: float = EPS,
    alpha: float = ALPHA,
) -> Accepted:
    """Emit the longest path of plausible drafts, then a pick of the target; see
    :class:`~specexport.runtime.acceptance.Acceptor`.

    Of paths that are equally long the one with the highest probability is taken, then the earlier one. At
    temperature 0 only the best token is plausible, so the rule is ``match``.
    """
    path = _longest(tree, row_of, sampler, position, eps, alpha)
    following = dict(pairwise(path))

    def choose(node: int, row: Row, place: int) -> tuple[int, int | None]:
        child = following.get(node)
        return (sampler.pick(row, place), None) if child is None else (int(tree.tokens[child]), child)

    return walk(choose, row_of, sampler, position, limit, stop)


def _longest(tree: Tree, row_of: RowOf, sampler: Sampler, position: int, eps: float, alpha: float) -> list[int]:
    """The path to take, found depth first; the sampler's history is as before at the end."""
    children: list[list[int]] = [[] for _ in range(len(tree))]
    for node, parent in enumerate(tree.parents.tolist()):
        if parent >= 0:
            children[parent].append(node)
    tokens = tree.tokens.tolist()
    best, best_score = [0], 0.0

    def visit(path: list[int], score: float) -> None:
        nonlocal best, best_score
        if (len(path), score) > (len(best), best_score):
            best, best_score = path, score
        node = path[-1]
        if not children[node]:
            return
        p = sampler.probs(row_of(node), position + len(path))
        least = threshold(p, eps, alpha)
        for child in children[node]:
            token = tokens[child]
            if p[token] > least:
                sampler.push(token)
                visit([*path, child], score + math.log(p[token]))
                sampler.pop(token)

    visit([0], 0.0)
    return best
