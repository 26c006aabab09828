"""Parts of trees, and a loop that verifies nothing but chains."""

from __future__ import annotations

import numpy as np
import pytest

from specexport.runtime.decoder import Decoder
from specexport.runtime.drafters import DraftRequest
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.tree import Tree
from tests.runtime.fake import FakeEngine, ToyModel
from tests.runtime.loop import Bushy, decode, reference


def test_the_trunk_follows_the_best_child() -> None:
    tree = Tree(np.array([7, 1, 2, 3, 4, 5]), np.array([-1, 0, 0, 2, 1, 2]), np.array([0, -2, -1, -3, -2.5, -2], "f4"))
    trunk = tree.trunk()
    assert trunk.tokens.tolist() == [7, 2, 5] and trunk.parents.tolist() == [-1, 0, 1]
    assert trunk.scores.tolist() == [0, -1, -2]


def test_without_scores_the_first_child_is_the_best() -> None:
    trunk = Tree(np.array([7, 1, 2, 3]), np.array([-1, 0, 0, 1])).trunk()
    assert trunk.tokens.tolist() == [7, 1, 3] and len(trunk.scores) == 0


def test_a_chain_is_its_own_trunk() -> None:
    chain = Tree.chain([1, 2, 3])
    assert chain.trunk() is chain


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.9, seed=3)], ids=["greedy", "hot"])
def test_chains_alone_reach_the_engine_where_nothing_else_is_exact(params: SamplingParams) -> None:
    model, prompt = ToyModel(29, 1), [3, 1, 4, 1, 5, 9, 2, 6]
    truth = reference(model, prompt, params, 100)
    drafter = Bushy(truth, 1, 29)
    branching = drafter.propose(DraftRequest(truth[0], 8, 8))
    assert len(branching.trunk()) < len(branching)
    tokens, statistics = decode(
        Decoder(FakeEngine(model, 200), Bushy(truth, 1, 29), chains=True), model, prompt, params, 100
    )
    assert tokens == truth and statistics.tau > 1
    # Each call accepted or refused a path; a chain of n nodes has no more than n - 1 depths to decide about.
    assert sum(statistics.tree_sizes.values()) == statistics.target_calls
    assert statistics.drafted_nodes <= statistics.target_calls * len(statistics.proposed)
