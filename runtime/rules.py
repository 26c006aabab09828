"""Every acceptance rule by name, and which drafters it can judge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from specexport.runtime.acceptance import Acceptor, match
from specexport.runtime.drafters.base import Drafter
from specexport.runtime.errors import UsageError
from specexport.runtime.rejection import rejection
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.typical import typical


@runtime_checkable
class SampledDrafter(Drafter, Protocol):
    """A drafter that draws its proposals at random, and whose trees carry what they were drawn from
    (:attr:`~specexport.runtime.tree.Tree.draft_probs`; none at temperature 0).

    Best draw with the target's own noise: propose the tokens with the highest log q(x) + G(seed, position of x, x).
    That is a draw without replacement, good for ``rejection``; for ``match`` it makes drafter and target agree more
    often than independent draws would (Gumbel coupling, ``scripts/measure_coupling.py``). A
    :class:`~specexport.runtime.sampling.Sampler` on the drafter's logits does it: ``pick`` draws, ``probs`` is q.
    """

    def begin_sampling(self, params: SamplingParams) -> None:
        """How the target samples from now on; called before ``begin``, once a prompt."""
        ...


@dataclass(frozen=True, slots=True)
class Rule:
    """An acceptance rule.

    Attributes:
        accept: the rule. lossy: its output does not follow the target's distribution.
        needs_samples: it judges only what a :class:`SampledDrafter` proposes.
        couples: a draft is right if it is the token that the target draws with its noise, so a
            :class:`~specexport.runtime.drafters.base.CoupledDrafter` had better draft with the same.
    """

    accept: Acceptor
    lossy: bool = False
    needs_samples: bool = False
    couples: bool = False


DEFAULT_RULE = "match"

#: Every rule by name. Command-line choices come from here.
RULES: dict[str, Rule] = {
    DEFAULT_RULE: Rule(match, couples=True),
    "rejection": Rule(rejection, needs_samples=True),
    "typical": Rule(typical, lossy=True),
}


def find_rule(name: str, drafter: Drafter | None) -> Rule:
    """The rule called ``name``, for what ``drafter`` proposes.

    Raises:
        UsageError: no such rule, or one that cannot judge this drafter.
    """
    if name not in RULES:
        raise UsageError(f"unknown acceptance {name!r}: expected one of {', '.join(RULES)}")
    rule, shown = RULES[name], drafter.name if drafter else "none"
    if name != DEFAULT_RULE and drafter is None:
        raise UsageError(f"acceptance {name!r} judges drafts, but drafter {shown!r} proposes none: leave it out")
    if rule.needs_samples and not isinstance(drafter, SampledDrafter):
        raise UsageError(
            f"acceptance {name!r} needs drafts drawn at random, but drafter {shown!r} does not draw them: use "
            f"{DEFAULT_RULE!r}"
        )
    return rule
