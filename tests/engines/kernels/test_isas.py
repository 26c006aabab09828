"""Every instruction set gives the very bits of the others."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from specexport.engines.kernels.library import kernels_library
from tests.engines.kernels import grow_node, one_node

pytestmark = one_node.needs_kernels

RunPython = Callable[..., subprocess.CompletedProcess[str]]
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.engines.kernels import grow_node, one_node
print(one_node.isa(), one_node.digest(), grow_node.digest())
"""


@pytest.fixture(scope="module")
def mine() -> list[str]:
    """What this process computes, by the set that suits the machine."""
    return [one_node.digest(), grow_node.digest()]


@pytest.mark.parametrize("isa", one_node.ISAS)
def test_a_set_gives_the_bits_of_the_best(isa: str, mine: list[str], run_python: RunPython) -> None:
    root = str(Path(__file__).parents[3])
    done = run_python("-c", PROGRAM, root, SPECEXPORT_KERNELS_ISA=isa, SPECEXPORT_KERNELS=str(kernels_library()))
    assert done.returncode == 0, done.stderr
    ran, *found = done.stdout.split()
    if ran != isa:
        pytest.skip(f"this processor has no {isa}")
    assert found == mine


def test_the_digest_would_tell(monkeypatch: pytest.MonkeyPatch, mine: list[str]) -> None:
    """One bit of one activation is enough."""
    rows = one_node.Product.rows

    def other(product: one_node.Product, count: int, seed: int = 7) -> one_node.Floats:
        found = rows(product, count, seed)
        found.view("uint32")[0, -1, -1] ^= 1
        return found

    monkeypatch.setattr(one_node.Product, "rows", other)
    assert one_node.digest() != mine[0]


def test_the_digest_of_trees_would_tell(monkeypatch: pytest.MonkeyPatch, mine: list[str]) -> None:
    """One bit of one logit of a root is enough."""
    call = grow_node.Head.call

    def other(head: grow_node.Head, *arguments: int) -> grow_node.Call:
        found = call(head, *arguments)
        best = int(found.feeds["logits"][0, : head.valid].argmax())
        found.feeds["logits"].view("uint32")[0, best] ^= 1
        return found

    monkeypatch.setattr(grow_node.Head, "call", other)
    assert grow_node.digest() != mine[1]
