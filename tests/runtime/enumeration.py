"""Exact distributions: run a random procedure once for every outcome of its decisions, with the outcome's probability.

Also a random language model on a tiny vocabulary, to be target and drafter of what is enumerated.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.tree import Tree

Result = TypeVar("Result")
Row = NDArray[np.float64]


class Fork:
    """A source of decisions that replays ``script`` and then takes the first possible outcome each time."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script = list(script)
        self.taken: list[int] = []
        self.probability = 1.0
        self.others: list[list[int]] = []

    def draw(self, weights: Row) -> int:
        chances = np.asarray(weights, np.float64) / np.sum(weights)
        place = len(self.taken)
        if place < len(self.script):
            chosen = self.script[place]
        else:
            possible = np.flatnonzero(chances).tolist()
            chosen = possible[0]
            self.others += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(chosen)
        self.probability *= float(chances[chosen])
        return chosen

    def happens(self, probability: float) -> bool:
        probability = min(1.0, probability)
        return self.draw(np.array([1 - probability, probability])) == 1


def outcomes(procedure: Callable[[Fork], Result]) -> Iterator[tuple[Result, float]]:
    """Every result of ``procedure`` with its probability; a result may come up more than once."""
    scripts: list[list[int]] = [[]]
    while scripts:
        fork = Fork(scripts.pop())
        result = procedure(fork)
        yield result, fork.probability
        scripts += fork.others


class RandomLM:
    """p(. | prefix), a Dirichlet draw that is keyed by the prefix; ``concentration`` below 1 makes it peaked."""

    def __init__(self, vocab: int, seed: int, concentration: float = 1.0) -> None:
        self.vocab, self.seed, self.concentration = vocab, seed, concentration
        self._rows: dict[tuple[int, ...], Row] = {}

    def row(self, prefix: Iterable[int]) -> Row:
        key = tuple(prefix)
        if key not in self._rows:
            rng = np.random.default_rng(zlib.crc32(bytes(key), self.seed))
            self._rows[key] = rng.dirichlet(np.full(self.vocab, self.concentration))
        return self._rows[key]

    def joint(self, length: int, prefix: tuple[int, ...] = ()) -> Row:
        """[V] * length: the probability of every continuation of ``prefix``."""
        if length == 0:
            return np.ones(())
        row = self.row(prefix)
        return np.stack([row[token] * self.joint(length - 1, (*prefix, token)) for token in range(self.vocab)])


def output(target: RandomLM, length: int, emitted: Iterable[tuple[Sequence[int], float]]) -> Row:
    """[V] * length: the distribution of the sequence when the target completes what a step emitted."""
    found = np.zeros((target.vocab,) * length)
    mass: dict[tuple[int, ...], float] = {}
    for tokens, probability in emitted:
        key = tuple(tokens)[:length]
        mass[key] = mass.get(key, 0.0) + probability
    for key, probability in mass.items():
        found[key] += probability * target.joint(length - len(key), key)
    return found


def shapes(nodes: int, depth: int) -> list[list[int]]:
    """Parents of every ordered tree with ``nodes`` drafted nodes, none deeper than ``depth``, in preorder."""
    found: list[list[int]] = [[-1]]
    for _ in range(nodes):
        # In preorder a new node hangs on the newest one or on one of its ancestors.
        found = [[*parents, above] for parents in found for above in _spine(parents, depth)]
    return found


def _spine(parents: list[int], depth: int) -> list[int]:
    spine, node = [], len(parents) - 1
    while node >= 0:
        spine.append(node)
        node = parents[node]
    return [node for place, node in enumerate(spine) if len(spine) - place <= depth]


def drawn_tree(parents: Sequence[int], drafter: RandomLM, fork: Fork) -> Tree:
    """Fill a shape with tokens from the drafter, siblings without replacement, and say what they were drawn from."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(parents)):
        above = paths[parents[node]]
        left = drafter.row(above).copy()
        for elder in range(1, node):
            if parents[elder] == parents[node]:
                left[paths[elder][-1]] = 0
        paths.append((*above, fork.draw(left)))
    tokens = np.array([0, *(path[-1] for path in paths[1:])], np.int64)
    return Tree(tokens, np.array(parents, np.int64), draft_probs=lambda node: drafter.row(paths[node]))


def path_tokens(tree: Tree, node: int) -> tuple[int, ...]:
    """Tokens from below the root down to ``node``."""
    return tuple(int(tree.tokens[place]) for place in tree.path(node)[1:])


def pair(vocab: int, seed: int, sharp: float = 1.0) -> tuple[RandomLM, RandomLM]:
    return RandomLM(vocab, 2 * seed, sharp), RandomLM(vocab, 2 * seed + 1, 0.7)
