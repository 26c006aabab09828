"""Policies over recorded answers: the replay makes the decoder's calls, and the controller holds its promises there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specexport.exporter.bench.replay import Recorded, RecordedHead, Step, read_recorded, record, replay
from specexport.runtime.controller import Controller
from specexport.runtime.decoder import Decoder
from specexport.runtime.drafters import Drafter, DraftRequest, make_drafter
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.tree import Tree
from specexport.runtime.worth import Prior
from tests.runtime.fake import FakeEngine, ToyModel
from tests.runtime.loop import AllRight, Scripted, decode, reference
from tests.runtime.test_controller import Curve

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]
MANIFEST: Any = SimpleNamespace(
    target=SimpleNamespace(valid_vocab=29, vocab_size=29, prefill_chunk=16), stop_ids=frozenset()
)


def recorded(heads: Sequence[Drafter], model: ToyModel) -> Recorded:
    params = SamplingParams(max_tokens=80)
    return record(MANIFEST, FakeEngine(model, 200), heads, PROMPT, params, "toy")


class Forked(Scripted):
    """Three deep and two wide; of two siblings the worse one is right at every third token."""

    name = "forked"

    def propose(self, request: DraftRequest) -> Tree:
        tokens, parents, scores, above = [request.root], [-1], [0.0], 0
        for place, token in enumerate(self.ahead(replace(request, max_nodes=4)), self.done):
            wrong = (token + 1) % 29
            tokens += [wrong, token] if place % 3 == 0 else [token, wrong]
            parents += [above, above]
            scores += [scores[above] - 0.2, scores[above] - 1.5]
            above = len(tokens) - (1 if place % 3 == 0 else 2)
        return Tree(np.array(tokens), np.array(parents), np.array(scores, np.float32)).best(request.max_nodes, 9)


def drafters(model: ToyModel) -> list[Drafter]:
    truth = reference(model, PROMPT, SamplingParams(), 80)
    return [AllRight(truth), Forked(truth)]


@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("name", ["scripted", "forked", "suffix"])
def test_a_replay_makes_the_calls_of_the_decoder(name: str, chains: bool, tmp_path: Path) -> None:
    model = ToyModel(29, 5)
    answer = recorded(drafters(model), model)
    file = tmp_path / "answers.jsonl"
    file.write_text(answer.to_json() + "\n")
    (answer,) = read_recorded(file)
    lookup = make_drafter("suffix", 29)
    real = next((head for head in drafters(model) if head.name == name), lookup)
    tokens, statistics = decode(
        Decoder(FakeEngine(model, 200), real, max_nodes=6, chains=chains), model, PROMPT, SamplingParams(), 80
    )
    assert tokens == answer.answer and answer.task == "toy"
    heads = [RecordedHead(name)] if name in answer.trees else []
    again = heads[0] if heads else make_drafter("suffix", 29)
    steps = replay(answer, again, heads, nodes=6, chains=chains, vocab_size=29)
    assert sum(step.emitted for step in steps) == 79 and steps[0].used == len(PROMPT)
    sizes: dict[int, int] = {}
    for step in steps:
        sizes[step.nodes] = sizes.get(step.nodes, 0) + 1
    assert sizes == statistics.tree_sizes
    assert all(list(step.asked) == [head.name for head in heads] for step in steps[:-1])
    assert not heads or (steps[0].asked[name], steps[1].asked[name]) == (len(PROMPT), steps[0].emitted)


def made_up(seed: int, length: int, right: float, prompt: int = 300) -> Recorded:
    """An answer without repeats, and an EAGLE-like head: trees 4 deep and 2 wide that are sure of themselves."""
    rng = random.Random(seed)
    tokens = [rng.randrange(1 << 16) for _ in range(prompt + length)]
    answer = tokens[prompt:]
    trees = []
    for place in range(length - 1):
        drafted, parents, scores, above = [answer[place]], [-1], [0.0], 0
        for depth in range(1, min(4, length - 1 - place) + 1):
            good = rng.random() < right
            drafted += [answer[place + depth] if good else -1 - depth, -10 - depth]
            parents += [above, above]
            scores += [scores[above] + float(np.log(0.8)), scores[above] + float(np.log(0.1))]
            above = len(drafted) - 2
        trees.append(Tree(np.array(drafted), np.array(parents), np.array(scores, np.float32)))
    successors = [[token + 1, *range(7)] for token in answer[:-1]]
    return Recorded("made up", tokens[:prompt], answer, successors, {"head": trees})


COSTS = Curve(0.06, head=0.45, head_row=0.01)


def seconds(steps: Sequence[Step]) -> float:
    """By the curve, a token to catch up with included."""
    return sum(COSTS.step_s(step.nodes, 0) + sum(COSTS.draft_s(*each) for each in step.asked.items()) for step in steps)


def test_a_head_that_is_useless_and_new_prompts_cost_three_percent_at_most_after_fifty_steps() -> None:
    """Bar of the controller: however good the head was and however sure it is, for whatever prompt comes next."""
    head = RecordedHead("head")
    lookup = make_drafter("suffix", 1 << 16)
    assert lookup is not None
    controller = Controller([lookup], [head], COSTS, max_nodes=16)

    def run(answer: Recorded) -> list[Step]:
        return replay(answer, controller, [head], nodes=16, vocab_size=1 << 16)

    good = run(made_up(1, 600, 0.85))
    assert 599 / seconds(good) > 1.3  # it is worth its costs, and used
    switched = run(made_up(2, 400, 0.0))  # its weights are shuffled; the prompt is another
    assert sum(step.emitted for step in switched[50:]) / seconds(switched[50:]) >= 0.97
    for seed in (3, 4, 5, 6):  # a prompt more costs a head 300 tokens to catch up with
        steps = run(made_up(seed, 120, 0.0))
        assert 119 / seconds(steps) >= 0.97
    again = run(made_up(7, 1200, 0.85))
    assert sum(step.emitted for step in again[100:]) / seconds(again[100:]) > 1.3


def test_a_head_that_is_useless_from_the_start_costs_little() -> None:
    head = RecordedHead("head")
    controller = Controller([], [head], COSTS, max_nodes=16)
    steps = replay(made_up(1, 400, 0.0, prompt=20), controller, [head], nodes=16)
    assert 399 / seconds(steps) >= 0.97
    assert sum(step.emitted for step in steps[50:]) / seconds(steps[50:]) >= 0.98


def test_a_bad_record_of_a_head_keeps_it_off_and_a_good_one_has_it_asked_at_once() -> None:
    for prior, right, least, most in ((Prior(0.3, 0.6), 0.0, 0, 5), (Prior(1.5, 0.7), 0.85, 37, 40)):
        head = RecordedHead("head")
        controller = Controller([], [head], COSTS, max_nodes=16, priors={"head": prior})
        steps = replay(made_up(1, 200, right), controller, [head], nodes=16)
        assert least <= sum(bool(step.asked) for step in steps[:40]) <= most
