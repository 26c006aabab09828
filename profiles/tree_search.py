"""The best draft tree for measured acceptance and the real cost of a step.

Idea: Sequoia (Chen et al. 2024, arXiv 2402.12374), which chooses the size and depth of a tree for the hardware. There a
dynamic programme over (size, depth) maximises the expected accepted tokens G(m, d). With acceptance by depth and rank
the expectation is a plain sum over nodes: each adds the product of the acceptances on its path. Those products fall
along every path, so for any depth limit the m largest form a tree, and no tree of m nodes does better: taking nodes by
falling product is exact, for all m at once. What Sequoia adds stays: the maximum over (m, d) of

    rate(m, d) = (1 + sum of the m - 1 largest products, none deeper than d) / (t(m) + draft(d))

with t the cost curve of the target and draft(d) what a proposal of that depth costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from specexport.runtime.drafters.paths import Path, best_paths

#: acceptance[depth][rank]; rows need not be sorted.
Acceptance = Sequence[Sequence[float]]
#: Share of steps that is not looked at any more, and most steps of one copy.
_NEGLIGIBLE, _LONGEST = 1e-6, 64.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree to draft.

    Attributes:
        paths: rank paths of its nodes, the most probable first; empty: plain decoding.
        tau: expected tokens of a step, the bonus token included. seconds: expected time of a step.
    """

    paths: tuple[Path, ...]
    tau: float
    seconds: float

    @property
    def nodes(self) -> int:
        """T, the root included."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        return max(map(len, self.paths), default=0)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tau / self.seconds

    @property
    def chain(self) -> bool:
        """No node has a sibling."""
        return self.depth == len(self.paths)


def expected_tokens(paths: Sequence[Path], acceptance: Acceptance, *, copies: bool = False) -> float:
    """tau of a tree: 1 + the sum over nodes of the product of acceptances on the path down to it.

    Args:
        copies: a lookup, whose copy goes on in the next step where this one ended if all of it was right. What was
            measured deep in long drafts then holds for the first draft of that step: short chains spend more of their
            steps inside of long matches, and get more out of each, than the first rows alone say.
    """
    deepest = max(map(len, paths), default=0)
    if not copies or not deepest or not acceptance:
        return 1.0 + sum(_chances(paths, acceptance))
    tokens = steps = 0.0
    share, begun = 1.0, 0
    while share > _NEGLIGIBLE and steps < _LONGEST:
        rows = [acceptance[min(begun + depth, len(acceptance) - 1)] for depth in range(deepest + 1)]
        chances = _chances(paths, rows)
        tokens += share * (1.0 + sum(chances))
        steps += share
        # The copy goes on if the bonus token was the next of it too.
        share *= sum(chance for path, chance in zip(paths, chances, strict=True) if len(path) == deepest) * sum(
            rows[-1]
        )
        begun += deepest + 1
    return tokens / steps


def _chances(paths: Sequence[Path], acceptance: Acceptance) -> list[float]:
    """Of each path to be right down to its end."""
    found = []
    for path in paths:
        chance = 1.0
        for depth, rank in enumerate(path):
            row = acceptance[depth] if depth < len(acceptance) else ()
            chance *= row[rank] if rank < len(row) else 0.0
        found.append(chance)
    return found


def best_tree(acceptance: Acceptance, nodes: int, depth: int) -> tuple[Path, ...]:
    """The ``nodes`` drafted nodes of largest expected gain, none deeper than ``depth``; fewer where the rest gain
    nothing. Every prefix is the best tree of its size."""
    # best_paths wants ranks whose chance falls; measured ones may cross.
    ranks = [sorted(range(len(row)), key=lambda rank, row=row: -row[rank]) for row in acceptance]  # type: ignore[misc]
    depth = min(depth, len(acceptance))
    widest = max(map(len, acceptance), default=0)

    def chance(level: int, place: int) -> float:
        return acceptance[level][ranks[level][place]] if place < len(ranks[level]) else 0.0

    found: list[Path] = []
    for parent, place, level in best_paths(nodes, depth if widest else 0, chance, widest):
        if chance(level - 1, place) <= 0.0:
            break  # candidates come by falling gain: from here on there is none
        above = found[parent - 1] if parent else ()
        found.append((*above, ranks[level - 1][place]))
    return tuple(found)


def search(
    acceptance: Acceptance,
    step_s: Callable[[int], float],
    draft_s: Callable[[int], float],
    widths: Sequence[int],
    *,
    max_depth: int,
    nodes: int = 0,
    copies: bool = False,
) -> Shape:
    """The tree of the best rate among those of at most each of ``widths`` nodes and at most ``max_depth`` deep.

    Args:
        step_s: time of a step of T nodes. draft_s: time of a proposal by its depth.
        widths: T that the engine is built for; a tree of fewer nodes costs the next of them. 1 is plain decoding.
        nodes: most that are drafted, 0: as many as the widths hold. copies: see :func:`expected_tokens`.
    """
    best = Shape((), 1.0, step_s(1))
    for depth in range(1, min(max_depth, len(acceptance)) + 1):
        paths = best_tree(acceptance, min(nodes or max(widths), max(widths) - 1), depth)
        for width in widths:
            chosen = paths[: width - 1]
            if not chosen:
                continue
            deepest = max(map(len, chosen))
            if deepest < depth and depth > 1:
                continue  # the same tree was met under a smaller limit
            seconds = step_s(width) + draft_s(deepest)
            shape = Shape(chosen, expected_tokens(chosen, acceptance, copies=copies), seconds)
            if shape.rate > best.rate:
                best = shape
    return best


def mean_step(step_s: Callable[[int], float], proposed: Sequence[float]) -> Callable[[int], float]:
    """Mean time of a step by its width where drafters often propose less than that.

    Args:
        proposed: share of steps that draft more than n nodes, see :class:`AcceptanceTable`; empty: all.
    """
    if not proposed:
        return step_s

    def mean_s(nodes: int) -> float:
        more = len(proposed)
        reached = [1.0, *(proposed[min(size, more) - 1] for size in range(1, nodes)), 0.0]
        shares = [here - after for here, after in pairwise(reached)]
        return sum(share * step_s(size) for size, share in enumerate(shares, 1) if share)

    return mean_s


def best_chain(
    acceptance: Acceptance,
    step_s: Callable[[int], float],
    draft_s: Callable[[int], float],
    max_depth: int,
    *,
    copies: bool = False,
) -> Shape:
    """The chain of the best rate, among lengths K from 1; it may be slower than plain decoding."""
    firsts = [(row[0] if row else 0.0,) for row in acceptance]
    shapes = []
    for depth in range(1, max(1, min(max_depth, len(acceptance))) + 1):
        paths = tuple((0,) * length for length in range(1, depth + 1))
        seconds = step_s(depth + 1) + draft_s(depth)
        shapes.append(Shape(paths, expected_tokens(paths, firsts, copies=copies), seconds))
    return max(shapes, key=lambda shape: shape.rate)


def chain_speedup(alpha: float, depth: int, cost: float) -> float:
    """The published formula (Leviathan et al. 2023, theorem 3.8): expected speedup of a chain of K drafts.

    ``(1 - a^(K+1)) / ((1 - a) (K c + 1))``: a target call of any width costs 1, a draft c.
    """
    tau = depth + 1.0 if alpha >= 1.0 else (1.0 - alpha ** (depth + 1)) / (1.0 - alpha)
    return tau / (depth * cost + 1.0)
