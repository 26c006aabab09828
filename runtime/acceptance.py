"""How a verified tree becomes tokens: the walk that every rule shares, and ``match``, the default rule.

``match`` draws each token as plain decoding would, and sees whether the tree already holds it. At each node of the walk
the sampler picks from the node's logits, the pick is emitted, and if a child carries it the walk goes on there; else it
ends, and the pick was the bonus token. A draw depends only on the logits, the history and the absolute position
(:mod:`specexport.runtime.sampling`), so the emitted tokens are those of plain decoding with the same seed, whatever
the tree. For a deterministic tree the chance to go on is the sum of p(child), the most any lossless rule reaches; it
equals the accept-or-renormalise loop of EAGLE and SpecInfer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from specexport.runtime.sampling import Sampler
from specexport.runtime.summary import Row
from specexport.runtime.tree import Tree

#: Chosen token's log-probability and the best ``(token, log-probability)`` pairs, see Sampler.logprobs_of.
Logprobs = tuple[float, list[tuple[int, float]]]
RowOf = Callable[[int], Row]
Stop = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one verified tree gave.

    Attributes:
        path: node indices from the root: the nodes whose cache rows are now part of the sequence.
        tokens: the emitted tokens, one per node of ``path``: ``tokens[i]`` was picked at ``path[i]``. All but the last
            are the tokens of ``path[1:]``; the last is the next root, and no row of it is committed, even if the
            walk was cut (``limit``, ``stop``) at a token that a child carries.
        logprobs: one entry per token where the parameters ask for them, else None.
        stopped: ``stop`` returned True for the last token.
    """

    path: list[int]
    tokens: list[int]
    logprobs: list[Logprobs] | None
    stopped: bool


class Acceptor(Protocol):
    """An acceptance rule."""

    def __call__(
        self,
        tree: Tree,
        row_of: RowOf,
        sampler: Sampler,
        position: int,
        *,
        limit: int | None = None,
        stop: Stop | None = None,
    ) -> Accepted:
        """Walk ``tree`` as far as the rule allows.

        Args:
            tree: the verified tree; its root's token is the last one in the sampler's history.
            row_of: logits float32 [V] of a node, maybe still on a device.
            sampler: gets every emitted token pushed, one by one, before the next is decided.
            position: absolute position of the root. The token picked at depth d has position + d + 1.
            limit: most tokens to emit (None: no limit), 1 or more.
            stop: called with each emitted token, in order; True ends the walk, and nothing is sampled after that token.
        """
        ...


def match(
    tree: Tree,
    row_of: RowOf,
    sampler: Sampler,
    position: int,
    *,
    limit: int | None = None,
    stop: Stop | None = None,
) -> Accepted:
    """Walk ``tree`` as far as the sampler's picks go; see :class:`Acceptor`. Lossless, token by token."""
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
        children.setdefault((parent, token), node)  # of siblings with the same token the first counts

    def choose(node: int, row: Row, place: int) -> tuple[int, int | None]:
        token = sampler.pick(row, place)
        return token, children.get((node, token))

    return walk(choose, row_of, sampler, position, limit, stop)


def walk(
    choose: Callable[[int, Row, int], tuple[int, int | None]],
    row_of: RowOf,
    sampler: Sampler,
    position: int,
    limit: int | None,
    stop: Stop | None,
) -> Accepted:
    """Go from the root from child to child; every rule emits tokens here.

    Args:
        choose: of (node, its logits, position of the token to emit): the token, and the child that carries it, if the
            walk may go on there.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be 1 or more, got {limit}")
    wants_logprobs = sampler.params.logprobs is not None
    path, tokens, logprobs = [0], [], []
    while True:
        row = row_of(path[-1])
        token, following = choose(path[-1], row, position + len(path))
        if wants_logprobs:
            logprobs.append(sampler.logprobs_of(row, token))
        sampler.push(token)
        tokens.append(token)
        stopped = stop is not None and stop(token)
        if stopped or following is None or len(tokens) == limit:
            return Accepted(path, tokens, logprobs if wants_logprobs else None, stopped)
        path.append(following)
