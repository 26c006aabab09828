"""Shapes of trees, and the usual static ones."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from specexport.exporter.heads.trees import TREES, DynamicTree, StaticTree, read_tree
from specexport.runtime.errors import UsageError

#: name -> nodes at each depth, candidates that a node needs.
SHAPES = {"medusa": ([10, 28, 23, 2], 10), "eagle": ([4, 8, 8, 3, 2], 4)}


def test_usual_trees_are_complete() -> None:
    """As the papers and their code have them: 63 nodes to depth 4, 25 nodes to depth 5."""
    assert {name: len(paths) for name, paths in TREES.items()} == {"medusa": 63, "eagle": 25}
    for name, paths in TREES.items():
        counts, topk = SHAPES[name]
        depths = Counter(map(len, paths))
        assert [depths[depth] for depth in sorted(depths)] == counts
        assert list(paths) == sorted(set(paths), key=lambda path: (len(path), path))
        for path in paths:
            assert len(path) == 1 or path[:-1] in paths
            assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths  # better ranks come first
        tree = StaticTree(paths)
        assert (tree.depth, tree.topk, tree.nodes) == (len(counts), topk, len(paths))


def test_template_numbers_nodes_by_depth_and_rank() -> None:
    tree = StaticTree(((1, 0), (1,), (0,), (1, 0, 3)))
    assert tree.template() == [(0, 0, 1), (0, 1, 1), (2, 0, 2), (3, 3, 3)]
    assert (tree.depth, tree.topk, tree.nodes) == (3, 4, 4)


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ((), "at least one path"),
        (((),), "expected 1 to"),
        (((0,), (0, 0, 0)), r"no parent \[0, 0\]"),
        (((0,), (0,)), "twice"),
        (((-1,),), "each from 0"),
    ],
)
def test_what_is_no_tree(paths: tuple[tuple[int, ...], ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        StaticTree(paths)


def test_a_dynamic_tree_is_not_larger_than_its_candidates() -> None:
    assert DynamicTree(depth=2, topk=3, nodes=12).pool == 12
    for depth, topk, nodes in ((2, 3, 13), (0, 3, 1), (1, 0, 1), (1, 3, 0)):
        with pytest.raises(ValueError, match=f"fewer than {nodes} nodes"):
            DynamicTree(depth, topk, nodes)


def test_reading(tmp_path: Path) -> None:
    assert read_tree("eagle") is TREES["eagle"]
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([[0], [1], [0, 0]]))
    assert read_tree(str(file)) == ((0,), (1,), (0, 0))
    for text, words in (
        ("[[0], [true]]", "no list of rank paths"),
        ('["0"]', "no list of rank paths"),
        ('{"0": 1}', "no list of rank paths"),
        ("[[0], [1, 0]]", "no parent"),
        ("[", "medusa, eagle nor a readable JSON file"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=words):
            read_tree(str(file))
    with pytest.raises(UsageError, match="'medusa63' is neither one of medusa, eagle"):
        read_tree("medusa63")
