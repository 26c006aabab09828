"""Drafts that heads cannot fill are refused before anything is exported."""

from __future__ import annotations

from pathlib import Path

import pytest

from specexport.exporter.heads.build import DraftOptions, check_draft, recurrent_tree
from specexport.exporter.heads.detect import open_head
from specexport.exporter.heads.trees import TREES, DynamicTree, StaticTree
from specexport.runtime.errors import UsageError
from tests.exporter.heads.writers import VD, V, every

HEADS = dict(every())


def test_a_static_tree_says_its_own_sizes() -> None:
    draft = DraftOptions(tree=TREES["eagle"], depth=1, topk=1, nodes=1)
    assert recurrent_tree(draft) == StaticTree(TREES["eagle"])
    assert recurrent_tree(DraftOptions(depth=2, topk=3, nodes=4)) == DynamicTree(2, 3, 4)


@pytest.mark.parametrize(
    ("dialect", "draft", "words"),
    [
        ("eagle3", DraftOptions(topk=VD), None),
        ("eagle3", DraftOptions(tree=TREES["medusa"]), None),
        ("medusa_pickle", DraftOptions(tree=((0,), (9,), (0, 0), (0, 0, 9))), None),
        ("eagle3", DraftOptions(depth=2, topk=3, nodes=13), "--draft-nodes 13: .* give 12 candidates"),
        ("eagle3", DraftOptions(topk=VD + 1), f"{VD + 1} candidates of each draft: the head has {VD} tokens"),
        ("eagle3", DraftOptions(tree=((0,), (1, 0))), "has no parent"),
        ("medusa_pickle", DraftOptions(tree=TREES["medusa"]), "expected 1 to 3 ranks"),
        ("medusa_pickle", DraftOptions(topk=V + 1), f"{V + 1} candidates of each draft: the head has {V} tokens"),
    ],
)
def test_what_heads_can_fill(dialect: str, draft: DraftOptions, words: str | None, tmp_path: Path) -> None:
    tiny = HEADS[dialect]
    head = open_head(str(tiny.write(tmp_path)), target=tiny.target)
    if words is None:
        check_draft(head, draft)
        return
    with pytest.raises(UsageError, match=words):
        check_draft(head, draft)
