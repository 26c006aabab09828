"""The parts of the torch target that have a definition of their own; whole models are in ``test_parity``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specexport.exporter.config import LayerConfig, read_config
from specexport.exporter.layers import Masks, RMSNorm, Target
from specexport.runtime.tree import Tree
from tests.tiny import LLAMA

SLOTS = 24


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    size = draw(st.integers(1, 8))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
    return Tree(np.zeros(size, np.int64), np.array(parents))


@settings(max_examples=60, deadline=None)
@given(tree=trees(), past=st.integers(0, SLOTS - 8), window=st.none() | st.integers(1, 10), half=st.booleans())
def test_a_node_sees_its_ancestors_and_what_is_committed(tree: Tree, past: int, window: int | None, half: bool) -> None:
    """Against the definition, entry by entry; a window counts positions."""
    dtype = torch.float16 if half else torch.float32
    positions = past + tree.depths()
    masks = Masks(SLOTS, {None, window}, dtype)(
        torch.from_numpy(tree.mask())[None], torch.tensor([past]), torch.from_numpy(positions)[None]
    )
    assert masks.keys() == {None, window}
    for key, mask in masks.items():
        assert mask.shape == (1, 1, len(tree), SLOTS) and mask.dtype == dtype
        for node in range(len(tree)):
            seen = {row: row for row in range(past)} | {past + other: positions[other] for other in tree.path(node)}
            allowed = {row for row, at in seen.items() if key is None or positions[node] - at < key}
            row = mask[0, 0, node]
            assert set(torch.nonzero(row == 0).flatten().tolist()) == allowed
            assert (row[row != 0] == torch.finfo(dtype).min).all()


def test_windows_keep_the_order_of_the_layers() -> None:
    """The order decides the graph's bytes, so it must not hang on a set's."""
    config = replace(read_config(LLAMA), layers=(LayerConfig(None, 0), LayerConfig(9, 0), LayerConfig(None, 0)))
    with torch.device("meta"):
        assert list(Target(config, SLOTS, torch.float32).masks.windows) == [None, 9]


def test_norms_are_computed_in_float32() -> None:
    """Squares of these overflow half precision."""
    norm = RMSNorm(4, 1e-6)
    norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    x = torch.tensor([[1000.0, -1000.0, 1000.0, 1000.0]], dtype=torch.float16)
    assert norm(x).dtype == torch.float32
    assert torch.allclose(norm(x), torch.tensor([[1.0, -2.0, 3.0, 4.0]]))


def test_only_the_residual_stream_and_norms_are_float32_in_half_precision() -> None:
    with torch.device("meta"):
        target = Target(read_config(LLAMA), SLOTS, torch.float16)
    kinds = {name: tensor.dtype for name, tensor in target.state_dict().items()}
    assert {name for name, dtype in kinds.items() if dtype == torch.float32} == {n for n in kinds if "norm" in n}
    assert set(kinds.values()) == {torch.float32, torch.float16}
    assert "lm_head" not in kinds


@pytest.mark.parametrize("capture", [-1, 3, "last", "0"])
def test_unknown_captures_are_refused(capture: int | str) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=r"expected 0\.\.2 or 'final'"):
        Target(read_config(LLAMA), SLOTS, torch.float32, (0, capture))
