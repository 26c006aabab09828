"""What one run did: counts, acceptance and where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specexport.runtime.stopping import FinishReason
from specexport.runtime.tree import Tree


@dataclass(slots=True)
class RunStatistics:
    """Counts and times of one ``generate``. Times are seconds in which the session worked, not those of its caller.

    The *decode phase* is every target call after the prefill. The first token is sampled from the prefill's logits
    and belongs to no decode call; the bonus token of each call counts.

    Attributes:
        drafter, acceptance: what proposed, and the rule that judged. lossy: that rule changes what is generated: the
            output is not what plain decoding would give or draw.
        prompt_tokens: length of the prompt. reused_tokens: those of its first tokens already in the cache.
        prefill_calls, prefill_s: target calls and time until the first token was sampled.
        first_token_s: time to the first token, encoding of the prompt included.
        tokens: emitted tokens, the first one and a stop token included.
        target_calls: calls of the decode phase. drafted_nodes: nodes they verified, roots excluded.
        tree_sizes: ``{T: calls}``, roots included.
        decisions: with the controller, ``{head: {T: calls}}``: how many calls verified T nodes after asking that head,
            ``lookups`` where none was asked.
        proposed: ``proposed[d - 1]``: calls that decided about a draft at depth d, the path being right up to d - 1.
        accepted: ``accepted[d - 1]``: those of them where the emitted token was drafted.
        decode_s: time of the decode phase, of which ``draft_s`` in the drafter, ``verify_s`` in the target.
        finish_reason: None while running.
    """

    drafter: str = "none"
    acceptance: str = "match"
    lossy: bool = False
    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefill_calls: int = 0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    tokens: int = 0
    target_calls: int = 0
    drafted_nodes: int = 0
    tree_sizes: dict[int, int] = field(default_factory=dict)
    decisions: dict[str, dict[int, int]] = field(default_factory=dict)
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    finish_reason: FinishReason | None = None

    def add_call(self, tree: Tree, path: Sequence[int], emitted: Sequence[int], asked: str | None = None) -> None:
        """Count one decode call: ``emitted[i]`` was sampled at node ``path[i]`` of ``tree``.

        Args:
            asked: what a controller asked for it.
        """
        size = len(tree)
        self.target_calls += 1
        self.tokens += len(emitted)
        self.drafted_nodes += size - 1
        self.tree_sizes[size] = self.tree_sizes.get(size, 0) + 1
        if asked is not None:
            sizes = self.decisions.setdefault(asked, {})
            sizes[size] = sizes.get(size, 0) + 1
        if size == 1:
            return
        parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
        for depth, (node, token) in enumerate(zip(path, emitted, strict=False)):
            children = [tokens[child] for child in range(node + 1, size) if parents[child] == node]
            if not children:
                return
            if depth == len(self.proposed):
                self.proposed.append(0)
                self.accepted.append(0)
            self.proposed[depth] += 1
            self.accepted[depth] += token in children

    @property
    def tau(self) -> float:
        """Emitted tokens per target call of the decode phase, bonus included; 1 for plain decoding, 0 without calls."""
        return (self.tokens - 1) / self.target_calls if self.target_calls else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the decode phase per second of it; 0 without calls."""
        return (self.tokens - 1) / self.decode_s if self.target_calls and self.decode_s > 0 else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of decided drafts that were accepted, from depth 1 on."""
        return [hits / tries for hits, tries in zip(self.accepted, self.proposed, strict=True)]

    @property
    def time_share(self) -> dict[str, float]:
        """Shares of ``decode_s`` that sum to 1: ``draft``, ``verify`` and the rest, ``host``; zeros without calls."""
        if self.decode_s <= 0:
            return {"draft": 0.0, "verify": 0.0, "host": 0.0}
        draft, verify = self.draft_s / self.decode_s, self.verify_s / self.decode_s
        return {"draft": draft, "verify": verify, "host": 1.0 - draft - verify}

    def as_dict(self) -> dict[str, Any]:
        """The figures under their stable JSON names."""
        return {
            "drafter": self.drafter,
            "acceptance": self.acceptance,
            "lossy": self.lossy,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "tokens": self.tokens,
            "target_calls": self.target_calls,
            "tau": self.tau,
            "tokens_per_second": self.tokens_per_second,
            "time_to_first_token_s": self.first_token_s,
            "prefill_s": self.prefill_s,
            "prefill_calls": self.prefill_calls,
            "decode_s": self.decode_s,
            "time_share": self.time_share,
            "acceptance_by_depth": self.acceptance_by_depth,
            "proposed_by_depth": list(self.proposed),
            "accepted_by_depth": list(self.accepted),
            "drafted_nodes": self.drafted_nodes,
            "tree_sizes": {str(size): calls for size, calls in sorted(self.tree_sizes.items())},
            "decisions": {
                asked: {str(size): calls for size, calls in sorted(sizes.items())}
                for asked, sizes in sorted(self.decisions.items())
            },
        }
