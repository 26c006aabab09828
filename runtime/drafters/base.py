"""The protocol of everything that proposes. A drafter proposes, it never decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.sampling import SamplingParams
from specexport.runtime.tree import Tree


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What the next step may use.

    Attributes:
        root: the last emitted token, not yet run through the target; node 0 of the tree.
        max_nodes: most nodes of the tree, the root included (>= 1).
        max_depth: most edges below the root (tokens left in budget and context).
    """

    root: int
    max_nodes: int
    max_depth: int


@dataclass(frozen=True, slots=True)
class Observation:
    """What one target call showed.

    Attributes:
        emitted: tokens appended to the sequence by this step: the accepted drafts, then the bonus token.
        tree: the tree that was verified. path: indices of its accepted nodes, the root first.
        logits: float32 [V] of a node (a view, valid only during the call to ``observe``); raises IndexError for a
            node whose logits were not computed.
        seconds: how long the call took.
    """

    emitted: Sequence[int]
    tree: Tree
    path: Sequence[int]
    logits: Callable[[int], NDArray[np.float32]]
    seconds: float = 0.0


class Drafter(Protocol):
    """A source of draft trees. The session calls ``begin`` once a prompt, then ``propose`` and ``observe`` in turn.

    ``propose`` must not change what a later ``propose`` returns (it may be skipped or its tree cut); all learning
    happens in ``begin`` and ``observe``. Memory is bounded, whatever the length of the session.
    """

    name: str

    def begin(self, tokens: Sequence[int], first: int) -> None:
        """A new prompt: ``tokens`` is the whole prompt, ``first`` the token sampled after it (the first root)."""
        ...

    def propose(self, request: DraftRequest) -> Tree:
        """A tree whose node 0 is ``request.root``; the root alone when there is nothing to propose."""
        ...

    def observe(self, observation: Observation) -> None:
        """Learn from one verified step."""
        ...


@runtime_checkable
class FeatureDrafter(Drafter, Protocol):
    """A drafter that reads the target's hidden states (the ``features`` output)."""

    def absorb(self, first: int, tokens: Sequence[int], features: NDArray[Any]) -> None:
        """Tokens that have just been committed, with the target's features of each.

        Called after every target call: for each prompt chunk before ``begin``, then for the accepted path of each step
        before ``observe``. A ``first`` below what was absorbed so far discards the rest (a new prompt shares a prefix);
        the last shared token then comes again, because another token may follow it.

        Args:
            first: absolute position of the first of them. features: [n, F], valid only during the call.
        """
        ...


@runtime_checkable
class CoupledDrafter(Drafter, Protocol):
    """A drafter that can choose its drafts with the noise that the target draws its tokens with.

    Its trees are still chosen, not drawn, so they carry no probabilities (unlike
    :class:`~specexport.runtime.rules.SampledDrafter`'s): only a rule that compares tokens gains by it.
    """

    def couple(self, params: SamplingParams | None) -> None:
        """The noise to draft with from now on; None: none. Called before ``begin``, once a prompt."""
        ...


@runtime_checkable
class StepwiseDrafter(Drafter, Protocol):
    """A drafter that pays for each token of its chain (a draft model): a shorter request is a cheaper one.

    Attributes:
        cost_per_token: True.
    """

    cost_per_token: bool


@runtime_checkable
class LaggingDrafter(Drafter, Protocol):
    """A drafter that catches up with the sequence when it is asked, not before: the first proposal costs the most."""

    @property
    def behind(self) -> int:
        """Tokens that the next proposal has to catch up with."""
        ...


@runtime_checkable
class DecidingDrafter(Drafter, Protocol):
    """A drafter that chooses whom to ask.

    Attributes:
        asked: what the last proposal cost: the name of a head, or ``lookups``; None before the first.
    """

    @property
    def asked(self) -> str | None: ...
