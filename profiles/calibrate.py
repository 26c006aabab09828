"""Running drafters on prompts: what a proposal costs, what a step costs the host, and which drafts come true."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from specexport.runtime.acceptance_table import AcceptanceCounter, AcceptanceTable
from specexport.runtime.decoder import Decoder
from specexport.runtime.device_profile import DraftCost
from specexport.runtime.drafters.base import Drafter, LaggingDrafter
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.engine import TargetEngine, chains_only
from specexport.runtime.manifest import Manifest
from specexport.runtime.sampling import Sampler, SamplingParams
from specexport.runtime.statistics import RunStatistics
from specexport.runtime.tree import Tree


@dataclass(slots=True)
class Recording(RunStatistics):
    """Statistics of a run that also count acceptance by depth and rank."""

    counter: AcceptanceCounter = field(default_factory=lambda: AcceptanceCounter(1))
    max_tokens: int = 0
    #: ``draft_s`` when each step began.
    drafted: list[float] = field(default_factory=list)

    def add_call(self, tree: Tree, path: Sequence[int], emitted: Sequence[int], asked: str | None = None) -> None:
        """See :meth:`RunStatistics.add_call`. The last tokens of an answer leave less room for drafts."""
        self.drafted.append(self.draft_s)
        reach = self.max_tokens - self.tokens - 1
        self.counter.add(tree.parents.tolist(), tree.tokens.tolist(), emitted, reach)
        RunStatistics.add_call(self, tree, path, emitted, asked)

    @property
    def first_draft_s(self) -> float:
        """Time of the first proposal, which had to catch up with the prompt."""
        return [*self.drafted, self.draft_s][1]

    @property
    def later_draft_s(self) -> float | None:
        """Mean time of the others."""
        count = len(self.drafted) - 1
        return (self.draft_s - self.first_draft_s) / count if count > 0 else None


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What running showed, by drafter, and the host's time of a step."""

    drafts: Mapping[str, DraftCost]
    acceptance: Mapping[str, AcceptanceTable]
    host_s: float


def calibrate(
    manifest: Manifest,
    engine: TargetEngine,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    nodes: int,
    depths: Mapping[str, int],
    advance: Callable[[int], object] = lambda _: None,
) -> Calibrated:
    """Answer every prompt with every drafter, and plainly; the order of drafters rotates. Trees are what a session
    would verify: of bundles that allow no other (:func:`~specexport.runtime.engine.chains_only`) chains.

    Args:
        prompts: token ids. params: with ``max_tokens``. nodes: widest tree, the root included.
        depths: deepest draft, by drafter. advance: told of every answer.
    """
    max_tokens = params.max_tokens or 1
    choices: list[tuple[str, Drafter | None]] = [("", None), *drafters.items()]
    decoders = {
        name: Decoder(
            engine,
            drafter,
            valid_vocab=manifest.target.valid_vocab,
            max_nodes=nodes,
            prefill_chunk=manifest.target.prefill_chunk,
            chains=chains_only(manifest.target.precision, engine),
        )
        for name, drafter in choices
    }
    counters = {name: AcceptanceCounter(depths.get(name, 1)) for name in decoders}
    drafting: dict[str, list[float]] = {name: [] for name in decoders}
    catching_up: dict[str, list[tuple[float, int]]] = {name: [] for name in decoders}
    hosting: list[float] = []
    for turn, prompt in enumerate(prompts):
        for name in _rotated(list(decoders), turn):
            run = Recording(counter=counters[name], max_tokens=max_tokens)
            sampler = Sampler(params, manifest.target.vocab_size, manifest.target.valid_vocab, manifest.stop_ids)
            steps = decoders[name].decode(
                prompt,
                sampler,
                max_tokens=max_tokens,
                stop=manifest.stop_ids.__contains__,
                cancelled=lambda: False,
                statistics=run,
            )
            for _ in steps:
                pass
            advance(1)
            if run.target_calls:
                drafting[name].append(
                    run.draft_s / run.target_calls if run.later_draft_s is None else run.later_draft_s
                )
                catching_up[name].append((run.first_draft_s, len(prompt)))
                hosting.append((run.decode_s - run.draft_s - run.verify_s) / run.target_calls)
    return Calibrated(
        drafts={
            name: DraftCost(
                seconds=median(drafting[name]),
                depth=depths.get(name, 0) if isinstance(drafter, ModelDrafter) else 0,
                row_s=row_s(catching_up[name], median(drafting[name])) if isinstance(drafter, LaggingDrafter) else 0.0,
            )
            for name, drafter in drafters.items()
            if drafting[name]
        },
        acceptance={name: counters[name].table() for name in drafters},
        host_s=max(0.0, median(hosting)) if hosting else 0.0,
    )


def row_s(firsts: Sequence[tuple[float, int]], draft_s: float) -> float:
    """Time of a token of the prompt in first proposals that took so long for so many."""
    return max(0.0, median((seconds - draft_s) / tokens for seconds, tokens in firsts))


def _rotated(names: list[str], turn: int) -> list[str]:
    place = turn % len(names)
    return names[place:] + names[:place]
