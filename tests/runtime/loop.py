"""Plain decoding without any cache, and drafters that know or scramble the answer: what loop tests compare and try."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from specexport.runtime.decoder import Decoder
from specexport.runtime.drafters import DraftRequest, Observation
from specexport.runtime.sampling import Sampler, SamplingParams
from specexport.runtime.statistics import RunStatistics
from specexport.runtime.tree import Tree
from tests.runtime.fake import ToyModel


def never(*_: object) -> bool:
    return False


def reference(
    model: ToyModel,
    prompt: Sequence[int],
    params: SamplingParams,
    count: int,
    stop: Callable[[int], bool] = never,
    valid_vocab: int | None = None,
) -> list[int]:
    """Up to ``count`` tokens, each from a full recompute of the whole history."""
    sampler = Sampler(params, model.vocab_size, valid_vocab)
    sampler.begin(prompt)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        token = sampler.pick(model.after(tokens), len(tokens))
        sampler.push(token)
        tokens.append(token)
        if stop(token):
            break
    return tokens[len(prompt) :]


def decode(
    decoder: Decoder,
    model: ToyModel,
    prompt: Sequence[int],
    params: SamplingParams,
    count: int | None,
    stop: Callable[[int], bool] = never,
    cancelled: Callable[[], bool] = never,
    valid_vocab: int | None = None,
) -> tuple[list[int], RunStatistics]:
    """The same through the loop under test."""
    statistics = RunStatistics()
    sampler = Sampler(params, model.vocab_size, valid_vocab)
    blocks = decoder.decode(prompt, sampler, max_tokens=count, stop=stop, cancelled=cancelled, statistics=statistics)
    return [token for block in blocks for token in block.tokens], statistics


class Scripted:
    """Base of drafters that know the output to come; ``done`` tokens of it are out."""

    name = "scripted"

    def __init__(self, truth: Sequence[int]) -> None:
        self.truth = list(truth)
        self.done = 0

    def begin(self, tokens: Sequence[int], first: int) -> None:
        self.done = 1

    def observe(self, observation: Observation) -> None:
        self.done += len(observation.emitted)

    def ahead(self, request: DraftRequest) -> list[int]:
        """The true tokens that the request has room for."""
        return self.truth[self.done : self.done + min(request.max_nodes - 1, request.max_depth)]

    def propose(self, request: DraftRequest) -> Tree:
        raise NotImplementedError


class AllRight(Scripted):
    """Every draft is accepted."""

    def propose(self, request: DraftRequest) -> Tree:
        return Tree.chain([request.root, *self.ahead(request)])


class AllWrong(Scripted):
    """No draft is accepted."""

    def propose(self, request: DraftRequest) -> Tree:
        return Tree.chain([request.root, *((token + 1) % 5 for token in self.ahead(request))])


class Bushy(Scripted):
    """Random wide trees that hide a part of the true path anywhere in them."""

    def __init__(self, truth: Sequence[int], seed: int, vocab: int) -> None:
        super().__init__(truth)
        self.random = random.Random(seed)
        self.vocab = vocab

    def propose(self, request: DraftRequest) -> Tree:
        right = self.ahead(request)
        right = right[: self.random.randint(0, len(right))]
        tokens, parents, depths = [request.root], [-1], [0]
        tip = 0  # last node of the true path so far
        while len(tokens) < request.max_nodes:
            if right and self.random.random() < 0.4:
                tokens.append(right.pop(0))
                parents.append(tip)
                depths.append(depths[tip] + 1)
                tip = len(tokens) - 1
            else:
                above = self.random.randrange(len(tokens))
                if depths[above] >= request.max_depth:
                    above = 0
                if request.max_depth == 0:
                    break
                token = self.random.randrange(self.vocab)
                # A second child with the true token would make two right answers.
                if any(parents[node] == above and tokens[node] == token for node in range(1, len(tokens))):
                    continue
                if right and above == tip and token == right[0]:
                    continue
                tokens.append(token)
                parents.append(above)
                depths.append(depths[above] + 1)
        return Tree(np.array(tokens, np.int64), np.array(parents, np.int64))
