"""What a recurrent drafter asks of its graph: every position once, from true features, whatever the session does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specexport.runtime.contract import DRAFT_LOGPROBS, DRAFT_PARENTS, DRAFT_TOKENS, FEATURES, PAST, TOKENS
from specexport.runtime.drafters import DraftRequest, recurrent
from specexport.runtime.drafters.base import LaggingDrafter
from specexport.runtime.drafters.recurrent import CHUNK, RecurrentDrafter
from specexport.runtime.errors import BundleError, UsageError

PATHS = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
PARENTS = [0, 0, 1, 1, 3]
SCORES = [-0.1, -3.0, -0.3, -1.0, -0.5]


class RecordingGraph:
    """Keeps rows as a cache does; its tree tells the row and the token that it grew from."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float]] = []  # (following token, feature)
        self.counts: list[int] = []

    def run(self, inputs: dict[str, Any]) -> dict[str, NDArray[Any]]:
        past = int(inputs[PAST][0])
        assert past <= len(self.rows), "a row was left out"
        features, tokens = inputs[FEATURES][0, :, 0].tolist(), inputs[TOKENS][0].tolist()
        assert len(features) == len(tokens)
        self.rows[past:] = zip(tokens, features, strict=True)
        self.counts.append(len(tokens))
        return {
            DRAFT_TOKENS: 1000 * len(self.rows) + np.arange(1, 6),
            DRAFT_PARENTS: np.array(PARENTS),
            DRAFT_LOGPROBS: np.array(SCORES, np.float32),
        }


def drafter(graph: RecordingGraph, *, limit: int = 100, slots: int = 1000, tree: Any = None) -> RecurrentDrafter:
    return RecurrentDrafter(graph, np.arange(9), nodes=5, depth=3, slots=slots, max_positions=limit, tree=tree)


def feature(position: int, token: int) -> float:
    return position + token / 1000


def absorb(made: RecurrentDrafter, first: int, tokens: Sequence[int]) -> None:
    made.absorb(first, tokens, np.array([[feature(first + i, t)] for i, t in enumerate(tokens)], np.float32))


def check(graph: RecordingGraph, tokens: Sequence[int], root: int) -> None:
    """The cache is what a fresh one would be: entry p joins token p's features with token p + 1."""
    following = [*tokens[1:], root]
    expected = [(after, np.float32(feature(p, t))) for p, (t, after) in enumerate(zip(tokens, following, strict=True))]
    assert graph.rows == expected


def request(root: int, nodes: int = 6, depth: int = 9) -> DraftRequest:
    return DraftRequest(root, nodes, depth)


def test_stable_rows_come_from_true_features() -> None:
    """Fault: draft rows of the drafter's own making kept. Steps of several tokens, then another prompt."""
    graph = RecordingGraph()
    made = drafter(graph)
    assert len(made.propose(request(9))) == 1  # nothing known
    absorb(made, 0, [5, 6, 7])
    tree = made.propose(request(8))
    check(graph, [5, 6, 7], 8)
    assert tree.tokens.tolist() == [8, 3001, 3002, 3003, 3004, 3005]
    assert tree.parents.tolist() == [-1, *PARENTS]
    assert made.propose(request(8)).tokens.tolist() == tree.tokens.tolist() and graph.counts == [3]
    absorb(made, 3, [8, 20, 21])
    made.propose(request(22))
    check(graph, [5, 6, 7, 8, 20, 21], 22)
    absorb(made, 6, [22])
    absorb(made, 7, [23, 24])  # no proposal between
    made.propose(request(25))
    check(graph, [5, 6, 7, 8, 20, 21, 22, 23, 24], 25)
    absorb(made, 1, [6, 70, 71])  # shares two tokens; the second comes again, for another follows it
    made.propose(request(72))
    check(graph, [5, 6, 70, 71], 72)


def test_a_rewind_within_what_was_not_yet_appended() -> None:
    graph = RecordingGraph()
    made = drafter(graph)
    absorb(made, 0, [5, 6, 7, 8])
    absorb(made, 1, [6, 70])
    made.propose(request(71))
    check(graph, [5, 6, 70], 71)


def test_a_gap_is_refused() -> None:
    made = drafter(RecordingGraph())
    absorb(made, 0, [5])
    with pytest.raises(BundleError, match="given position 3, expected at most 1"):
        absorb(made, 3, [6])


def test_a_long_prompt_is_absorbed_in_pieces() -> None:
    graph = RecordingGraph()
    made = drafter(graph, limit=10 * CHUNK)
    tokens = list(range(2 * CHUNK + 7))
    for first in range(0, len(tokens), 100):
        absorb(made, first, tokens[first : first + 100])
    made.propose(request(999))
    check(graph, tokens, 999)
    assert max(graph.counts) == CHUNK


def test_who_is_not_asked_costs_nothing_until_the_backlog_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = RecordingGraph()
    made = drafter(graph, limit=10 * CHUNK)
    absorb(made, 0, [5] * (CHUNK + 9))
    absorb(made, CHUNK + 9, [6])
    assert graph.counts == [] and made.behind == CHUNK + 10 and isinstance(made, LaggingDrafter)
    made.propose(request(8))
    assert graph.counts == [CHUNK, 10] and made.behind == 0
    monkeypatch.setattr(recurrent, "BACKLOG", 4 * (CHUNK + 20))  # a feature has 4 bytes
    for position in range(CHUNK + 10, 2 * CHUNK + 40):
        absorb(made, position, [6])
    assert graph.counts == [CHUNK, 10, CHUNK] and made.behind == 30


def test_the_tree_is_cut_to_the_request() -> None:
    made = drafter(RecordingGraph())
    absorb(made, 0, [5])
    tree = made.propose(request(8, nodes=4))
    assert tree.tokens.tolist() == [8, 1001, 1003, 1005] and tree.parents.tolist() == [-1, 0, 1, 2]
    assert made.propose(request(8, depth=1)).tokens.tolist() == [8, 1001, 1002]
    assert len(made.propose(request(8, depth=0))) == 1


@pytest.mark.parametrize(("limit", "slots"), [(12, 1000), (1000, 12)])
def test_past_its_context_it_says_so_once_and_proposes_nothing(
    limit: int, slots: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: a drafter with a shorter limit than the target. The deepest node must fit too; a new prompt drafts."""
    graph = RecordingGraph()
    made = drafter(graph, limit=limit, slots=slots)
    absorb(made, 0, [5] * 9)
    assert len(made.propose(request(8))) == 6  # 9 rows and 3 depths
    with caplog.at_level(logging.WARNING):
        for position in range(9, 20):
            absorb(made, position, [8])
            assert len(made.propose(request(8))) == 1
    assert [record.message for record in caplog.records] == ["eagle3: past its context of 12 tokens, decoding plainly"]
    assert len(graph.rows) == 9
    absorb(made, 4, [5, 30])
    made.propose(request(31))
    check(graph, [5] * 5 + [30], 31)


def test_a_static_tree_is_the_graphs() -> None:
    made = drafter(RecordingGraph(), tree=PATHS)
    absorb(made, 0, [5])
    assert made.propose(request(8)).parents.tolist() == [-1, *PARENTS]
    with pytest.raises(UsageError, match="drafts 5 nodes, its static tree has 4"):
        drafter(RecordingGraph(), tree=PATHS[:-1])
    with pytest.raises(UsageError, match="1 to 3 ranks"):
        drafter(RecordingGraph(), tree=((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (1,)))
    other = drafter(RecordingGraph(), tree=((0,), (1,), (0, 0), (1, 0), (0, 0, 0)))
    absorb(other, 0, [5])
    with pytest.raises(BundleError, match="grows another tree than the manifest says"):
        other.propose(request(8))
