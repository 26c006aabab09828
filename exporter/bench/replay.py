"""Answers of a target with what every head would have drafted along them, and policies run over them without a target.

Under the rule ``match`` no drafter changes a token, so one plain answer serves every policy: a step emits what its tree
has right and one token more. What a head drafts depends on the committed tokens alone, so it is recorded once for each
position. Replaying takes milliseconds an answer, and the time of a step comes from a cost curve: two policies differ by
what they choose, never by the machine's mood.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.decoder import Decoder
from specexport.runtime.drafters.base import CoupledDrafter, Drafter, DraftRequest, FeatureDrafter, Observation
from specexport.runtime.drafters.recycling import RANK_PROBABILITY, top_k
from specexport.runtime.engine import TargetEngine
from specexport.runtime.manifest import Manifest
from specexport.runtime.sampling import Sampler, SamplingParams
from specexport.runtime.statistics import RunStatistics
from specexport.runtime.tree import Tree

#: Successors that are kept of each row of logits: as many as Token Recycling learns.
KEPT = len(RANK_PROBABILITY)
#: Nodes that a head is asked for, the root included.
WIDEST = 32


@dataclass(frozen=True, slots=True)
class Recorded:
    """One answer.

    Attributes:
        prompt, answer: token ids. successors: ``successors[i]``: likeliest tokens after ``answer[i]``, best first.
        trees: ``trees[head][i]``: what the head drafted for the root ``answer[i]``. Both lack the last token.
    """

    task: str
    prompt: list[int]
    answer: list[int]
    successors: list[list[int]]
    trees: dict[str, list[Tree]]

    def to_json(self) -> str:
        """One line."""
        trees = {
            name: [[t.tokens.tolist(), t.parents.tolist(), np.round(t.scores, 4).tolist()] for t in found]
            for name, found in self.trees.items()
        }
        return json.dumps([self.task, self.prompt, self.answer, self.successors, trees], separators=(",", ":"))

    @staticmethod
    def from_json(line: str) -> Recorded:
        """The reverse of :meth:`to_json`."""
        task, prompt, answer, successors, trees = json.loads(line)
        return Recorded(
            task,
            prompt,
            answer,
            successors,
            {
                name: [Tree(np.array(t), np.array(p), np.array(s, np.float32)) for t, p, s in found]
                for name, found in trees.items()
            },
        )


def read_recorded(path: Path) -> list[Recorded]:
    """The answers of a file."""
    with path.open() as lines:
        return [Recorded.from_json(line) for line in lines]


class _Recorder:
    """Asks every head and proposes nothing."""

    name = "recorder"

    def __init__(self, heads: Sequence[Drafter], valid_vocab: int) -> None:
        self._heads, self._valid = heads, valid_vocab
        self.trees: dict[str, list[Tree]] = {head.name: [] for head in heads}
        self.successors: list[list[int]] = []

    def couple(self, params: SamplingParams | None) -> None:
        for head in self._heads:
            if isinstance(head, CoupledDrafter):
                head.couple(params)

    def begin(self, tokens: Sequence[int], first: int) -> None:
        for head in self._heads:
            head.begin(tokens, first)

    def propose(self, request: DraftRequest) -> Tree:
        for head in self._heads:
            self.trees[head.name].append(head.propose(DraftRequest(request.root, WIDEST, request.max_depth)))
        return Tree.chain([request.root])

    def observe(self, observation: Observation) -> None:
        self.successors.append(top_k(observation.logits(0)[: self._valid], KEPT).tolist())
        for head in self._heads:
            head.observe(observation)


class _FeatureRecorder(_Recorder):
    """One with heads that read features."""

    def absorb(self, first: int, tokens: Sequence[int], features: NDArray[Any]) -> None:
        for head in self._heads:
            if isinstance(head, FeatureDrafter):
                head.absorb(first, tokens, features)


def record(
    manifest: Manifest,
    engine: TargetEngine,
    heads: Sequence[Drafter],
    prompt: Sequence[int],
    params: SamplingParams,
    task: str,
) -> Recorded:
    """Answer a prompt plainly and ask every head at every token. The next call begins with an empty cache."""
    kind = _FeatureRecorder if any(isinstance(head, FeatureDrafter) for head in heads) else _Recorder
    recorder = kind(heads, manifest.target.valid_vocab)
    decoder = Decoder(
        engine,
        recorder,
        valid_vocab=manifest.target.valid_vocab,
        prefill_chunk=manifest.target.prefill_chunk,
    )
    sampler = Sampler(params, manifest.target.vocab_size, manifest.target.valid_vocab, manifest.stop_ids)
    answer: list[int] = []
    for block in decoder.decode(
        prompt,
        sampler,
        max_tokens=params.max_tokens,
        stop=manifest.stop_ids.__contains__,
        cancelled=lambda: False,
        statistics=RunStatistics(),
    ):
        answer += block.tokens
    return Recorded(task, list(prompt), answer, recorder.successors, recorder.trees)


class RecordedHead:
    """A head that was recorded, as a drafter.

    Args:
        lags: it has a cache of its own, so it has to catch up.

    Attributes:
        behind: tokens that it has to catch up with. asked: what it had to, of all its proposals so far.
    """

    def __init__(self, name: str, *, lags: bool = True) -> None:
        self.name, self._lags = name, lags
        self.asked: list[int] = []
        self.behind = 0
        self._trees: list[Tree] = []
        self._index = 0

    def load(self, recorded: Recorded) -> None:
        """Draft along this answer from now on."""
        self._trees = recorded.trees[self.name]

    def begin(self, tokens: Sequence[int], first: int) -> None:
        """The first root."""
        self._index, self.behind = 0, len(tokens) if self._lags else 0

    def observe(self, observation: Observation) -> None:
        """The next root."""
        self._index += len(observation.emitted)
        self.behind += len(observation.emitted) if self._lags else 0

    def propose(self, request: DraftRequest) -> Tree:
        """What the head drafted here, as far as it fits."""
        self.asked.append(self.behind)
        self.behind = 0
        tree = self._trees[self._index]
        if not len(tree.scores):  # a chain
            return tree.pruned(min(request.max_nodes, request.max_depth + 1))
        return tree.best(request.max_nodes, request.max_depth)


def follow(tree: Tree, upcoming: Sequence[int]) -> tuple[list[int], list[int]]:
    """(path, emitted tokens) of a step whose target would go on with ``upcoming``."""
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    path, emitted = [0], []
    for token in upcoming:
        emitted.append(token)
        found = [node for node in range(path[-1] + 1, len(tree)) if parents[node] == path[-1] and tokens[node] == token]
        if not found:
            break
        path.append(found[0])
    return path[: len(emitted)], emitted


@dataclass(frozen=True, slots=True)
class Step:
    """One replayed call: T, cache rows in use before it, emitted tokens, and the heads that were asked for it, with the
    tokens that they had to catch up with."""

    nodes: int
    used: int
    emitted: int
    asked: dict[str, int]


def replay(
    recorded: Recorded,
    drafter: Drafter | None,
    heads: Sequence[RecordedHead],
    *,
    nodes: int,
    chains: bool = False,
    vocab_size: int = 0,
    step_s: Callable[[int, int], float] = lambda nodes, used: 0.0,
) -> list[Step]:
    """The calls that a decoder would make along a recorded answer.

    Args:
        step_s: time of a call, by nodes and rows in use, that drafters are told.
        drafter: what proposes, None: nothing. heads: those among its drafters. nodes: widest tree. chains: see
            :class:`Decoder`. vocab_size: V of the rows of logits that drafters learn from.
    """
    for head in heads:
        head.load(recorded)
    rest = -1.0 - np.random.default_rng(0).random(vocab_size, np.float32)  # all different, as in rows of logits
    past, done, steps = len(recorded.prompt), 1, []
    if drafter:
        drafter.begin(recorded.prompt, recorded.answer[0])
    while done < len(recorded.answer):
        root, left = recorded.answer[done - 1], len(recorded.answer) - done
        before = [len(head.asked) for head in heads]
        tree = Tree.chain([root])
        if drafter and left > 1 and nodes > 1:
            tree = drafter.propose(DraftRequest(root, nodes, left - 1)).pruned(nodes)
            tree = tree.trunk() if chains else tree
        path, emitted = follow(tree, recorded.answer[done:])
        asked = {
            head.name: head.asked[-1] for head, count in zip(heads, before, strict=True) if len(head.asked) > count
        }
        steps.append(Step(len(tree), past, len(emitted), asked))

        def logits(node: int, path: list[int] = path, first: int = done - 1) -> NDArray[np.float32]:
            if node not in path:
                raise IndexError
            row = rest.copy()
            row[recorded.successors[first + path.index(node)]] = np.arange(KEPT, 0, -1)
            return row

        if drafter:
            drafter.observe(Observation(emitted, tree, path, logits, step_s(len(tree), past)))
        past, done = past + len(path), done + len(emitted)
    return steps
