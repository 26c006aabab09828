"""Rules by name, and what they do in the loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specexport.runtime.decoder import Decoder
from specexport.runtime.drafters import DRAFTERS, DraftRequest, Observation, make_drafter
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.errors import UsageError
from specexport.runtime.rules import DEFAULT_RULE, RULES, SampledDrafter, find_rule
from specexport.runtime.sampling import Sampler, SamplingParams
from specexport.runtime.tree import Tree
from tests.runtime.fake import FakeEngine, ToyModel
from tests.runtime.loop import decode, reference
from tests.runtime.test_rejection_drawn import chi_square

PROMPT = [3, 1, 2, 0, 1]


class Coupled:
    """Proposes nothing, and writes down what it is told."""

    name = "coupled"

    def __init__(self) -> None:
        self.told: list[SamplingParams | str | None] = []

    def couple(self, params: SamplingParams | None) -> None:
        self.told.append(params)

    def begin(self, tokens: Sequence[int], first: int) -> None:
        self.told.append("begin")

    def observe(self, observation: Observation) -> None:
        pass

    def propose(self, request: DraftRequest) -> Tree:
        return Tree.chain([request.root])


class Drawing:
    """Draws a tree from a model of its own, with the target's noise; ``parents`` is its shape."""

    name = "drawing"

    def __init__(self, model: ToyModel, parents: Sequence[int], coupled: bool = True) -> None:
        self.model, self.parents, self.coupled = model, list(parents), coupled
        self.began: list[SamplingParams] = []

    def begin_sampling(self, params: SamplingParams) -> None:
        self.params = params
        self.began.append(params)
        seed = params.seed if self.coupled else params.seed ^ 1 << 60
        self.sampler = Sampler(SamplingParams(temperature=params.temperature, seed=seed), self.model.vocab_size)

    def begin(self, tokens: Sequence[int], first: int) -> None:
        self.history = [*tokens, first]

    def observe(self, observation: Observation) -> None:
        self.history += observation.emitted

    def propose(self, request: DraftRequest) -> Tree:
        kept = [0]  # nodes of the shape that fit, by number: what is cut does not depend on what is drawn
        depths = [0]
        for node in range(1, len(self.parents)):
            depths.append(depths[self.parents[node]] + 1)
            if depths[node] <= request.max_depth and len(kept) < request.max_nodes:
                kept.append(node)
        parents = [-1, *(kept.index(self.parents[node]) for node in kept[1:])]
        paths: list[tuple[int, ...]] = [()]
        taken: dict[int, list[int]] = {}
        for node in range(1, len(kept)):
            above = paths[parents[node]]
            row = self.row(above)
            row[taken.setdefault(parents[node], [])] = -np.inf
            token = self.sampler.pick(row, len(self.history) + len(above))
            taken[parents[node]].append(token)
            paths.append((*above, token))
        tokens = np.array([request.root, *(path[-1] for path in paths[1:])], np.int64)
        return Tree(
            tokens, np.array(parents, np.int64), draft_probs=lambda node: self.sampler.probs(self.row(paths[node]), 0)
        )

    def row(self, path: Sequence[int]) -> np.ndarray:
        return self.model.after([*self.history, *path])


SHAPES = {"chain": [-1, 0, 1, 2], "tree": [-1, 0, 0, 1, 1, 2]}


class TestRejectionInTheLoop:
    @pytest.mark.parametrize("kind", [*SHAPES, "model"])
    def test_the_output_follows_the_target(self, kind: str) -> None:
        """Four tokens over several steps: drafts that are drawn again at a position they were refused at, too."""
        model = ToyModel(4, 3)
        expected = joint(model, SamplingParams(temperature=2.5, frequency_penalty=0.4), 4)
        counts, runs, steps = np.zeros((4, 4, 4, 4)), 3000, 0
        other = ToyModel(4, 9)
        drafter: SampledDrafter = (
            ModelDrafter(FakeEngine(other, 40), np.arange(4), 4, depth=3)
            if kind == "model"
            else Drawing(other, SHAPES[kind])
        )
        decoder = Decoder(FakeEngine(model, 40), drafter, acceptance="rejection")
        for seed in range(runs):
            params = SamplingParams(temperature=2.5, frequency_penalty=0.4, seed=seed)
            tokens, statistics = decode(decoder, model, PROMPT, params, 4)
            counts[tuple(tokens)] += 1
            steps += statistics.target_calls
        assert (statistics.acceptance, statistics.lossy) == ("rejection", False)
        assert chi_square(counts.ravel(), runs * expected.ravel())
        assert 1.1 * runs < steps < 2.8 * runs

    def test_reproducible_by_the_seed(self) -> None:
        model = ToyModel(9, 3)
        outputs = []
        for seed in (1, 1, 2):
            decoder = Decoder(FakeEngine(model, 100), Drawing(ToyModel(9, 4), SHAPES["tree"]), acceptance="rejection")
            outputs.append(decode(decoder, model, PROMPT, SamplingParams(temperature=2.0, seed=seed), 50)[0])
        assert outputs[0] == outputs[1] != outputs[2]

    def test_greedy_gives_plain_tokens(self) -> None:
        model = ToyModel(9, 3)
        decoder = Decoder(FakeEngine(model, 100), Drawing(ToyModel(9, 3), SHAPES["tree"]), acceptance="rejection")
        tokens, statistics = decode(decoder, model, PROMPT, SamplingParams(), 50)
        assert tokens == reference(model, PROMPT, SamplingParams(), 50) and statistics.tau > 1

    def test_a_drafter_that_forgot_what_it_drew_from(self) -> None:
        class Forgetful(Drawing):
            def propose(self, request: DraftRequest) -> Tree:
                tree = super().propose(request)
                return Tree(tree.tokens, tree.parents)

        model = ToyModel(9, 3)
        decoder = Decoder(FakeEngine(model, 100), Forgetful(model, SHAPES["tree"]), acceptance="rejection")
        with pytest.raises(ValueError, match="draft_probs"):
            decode(decoder, model, PROMPT, SamplingParams(temperature=1.0), 50)
        assert decoder.committed == []


def joint(model: ToyModel, params: SamplingParams, length: int) -> np.ndarray:
    """Probability of each output of plain sampling."""

    def level(output: list[int]) -> np.ndarray:
        if len(output) == length:
            return np.ones(())
        sampler = Sampler(params, model.vocab_size)
        sampler.begin(PROMPT)
        for token in output:
            sampler.push(token)
        p = sampler.probs(model.after([*PROMPT, *output]), 0)
        return np.stack([p[token] * level([*output, token]) for token in range(model.vocab_size)])

    return level([])


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if not rule.needs_samples])
def test_noise_is_given_where_drafts_are_compared_with_draws(rule: str) -> None:
    model, params = ToyModel(9, 3), SamplingParams(temperature=2.0, seed=5)
    drafter = Coupled()
    decode(Decoder(FakeEngine(model, 40), drafter, acceptance=rule), model, PROMPT, params, 5)
    assert drafter.told == [params if rule == DEFAULT_RULE else None, "begin"]


class TestMatchWithASampledDrafter:
    def test_tokens_stay_those_of_plain_decoding_and_coupling_accepts_more(self) -> None:
        model, params = ToyModel(9, 3), SamplingParams(temperature=2.0, seed=5)
        tau = []
        for coupled in (True, False):
            drafter = Drawing(ToyModel(9, 3, surprise=2), SHAPES["chain"], coupled)
            tokens, statistics = decode(Decoder(FakeEngine(model, 400), drafter), model, PROMPT, params, 300)
            assert tokens == reference(model, PROMPT, params, 300)
            assert drafter.began == [params]
            tau.append(statistics.tau)
        assert tau[0] > 1.3 * tau[1]


class TestTypicalInTheLoop:
    @pytest.mark.parametrize("name", sorted(DRAFTERS))
    def test_more_tokens_a_call_and_marked(self, name: str) -> None:
        model, params = ToyModel(9, 6), SamplingParams(temperature=2.0, seed=5)
        results = {}
        for rule in ("match", "typical"):
            decoder = Decoder(FakeEngine(model, 400), make_drafter(name, 9), acceptance=rule)
            tokens, statistics = decode(decoder, model, PROMPT, params, 300)
            assert len(tokens) == 300 and statistics.as_dict()["lossy"] == (rule == "typical")
            assert statistics.as_dict()["acceptance"] == rule
            results[rule] = tokens, statistics.tau
        assert results["typical"][0] != results["match"][0]
        assert results["typical"][1] > results["match"][1]

    def test_deterministic(self) -> None:
        model, params = ToyModel(9, 6), SamplingParams(temperature=2.0, seed=5)
        runs = [
            decode(
                Decoder(FakeEngine(model, 400), make_drafter("suffix", 9), acceptance="typical"), model, PROMPT, p, 90
            )[0]
            for p in (params, params, SamplingParams(temperature=2.0, seed=6))
        ]
        assert runs[0] == runs[1] != runs[2]


class TestFinding:
    def test_unknown(self) -> None:
        with pytest.raises(UsageError, match="unknown acceptance 'lucky': expected one of match, rejection, typical"):
            find_rule("lucky", None)

    @pytest.mark.parametrize("name", sorted(DRAFTERS))
    def test_drafters_that_do_not_draw(self, name: str) -> None:
        drafter = make_drafter(name, 9)
        assert not isinstance(drafter, SampledDrafter)
        assert find_rule(DEFAULT_RULE, drafter) is RULES["match"] and find_rule("typical", drafter).lossy
        with pytest.raises(UsageError, match=f"drafter '{name}' does not draw them: use 'match'") as error:
            Decoder(FakeEngine(ToyModel(9, 1), 20), drafter, acceptance="rejection")
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("name", ["rejection", "typical"])
    def test_nothing_to_judge(self, name: str) -> None:
        with pytest.raises(UsageError, match=f"acceptance '{name}' judges drafts, but drafter 'none' proposes none"):
            find_rule(name, None)
        assert find_rule(DEFAULT_RULE, None).accept is RULES["match"].accept
