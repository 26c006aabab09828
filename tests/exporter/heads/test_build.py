"""Drafts that heads cannot fill are refused before anything is exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specexport.exporter.heads.build import DraftOptions, check_draft, recurrent_tree
from specexport.exporter.heads.detect import open_head
from specexport.exporter.heads.trees import TREES, DynamicTree, StaticTree
from specexport.runtime.errors import CheckpointError, UsageError
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


def noted(folder: Path, held_out: Any) -> Path:
    """A head whose config says so of its training."""
    tiny = HEADS["eagle3"]
    directory = tiny.write(folder)
    config = json.loads((directory / "config.json").read_text())
    config["specexport_training"] = {"method": "eagle3", "held_out": held_out}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("held_out", "agreement"),
    [({"agreement": [0.6, 0.5, 1]}, (0.6, 0.5, 1.0)), ({"tau": 2.0}, ()), (None, ()), ({"agreement": []}, ())],
)
def test_what_training_noted_is_known(held_out: Any, agreement: tuple[float, ...], tmp_path: Path) -> None:
    head = open_head(str(noted(tmp_path, held_out)), target=HEADS["eagle3"].target)
    assert head.agreement() == agreement


@pytest.mark.parametrize(
    "agreement", [[0.6, 1.2], [-0.1], [float("nan")], ["0.6"], [True], 0.6, {"0": 0.6}, [0.5] * 65]
)
def test_what_is_no_agreement_is_refused_before_anything_is_exported(agreement: Any, tmp_path: Path) -> None:
    head = open_head(str(noted(tmp_path, {"agreement": agreement})), target=HEADS["eagle3"].target)
    with pytest.raises(
        CheckpointError, match=r"specexport_training.held_out.agreement.* expected .*; remove it"
    ) as error:
        check_draft(head, DraftOptions(topk=2, depth=2, nodes=4))
    assert "\n" not in str(error.value)
