"""Every instruction set gives the very bits of the others."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from specexport.engines.kernels.library import kernels_library
from tests.engines.kernels import one_node

pytestmark = one_node.needs_kernels

RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def mine() -> str:
    """What this process computes, by the set that suits the machine."""
    return one_node.digest()


@pytest.mark.parametrize("isa", one_node.ISAS)
def test_a_set_gives_the_bits_of_the_best(isa: str, mine: str, run_python: RunPython) -> None:
    done = run_python(one_node.__file__, SPECEXPORT_KERNELS_ISA=isa, SPECEXPORT_KERNELS=str(kernels_library()))
    assert done.returncode == 0, done.stderr
    ran, found = done.stdout.split()
    if ran != isa:
        pytest.skip(f"this processor has no {isa}")
    assert found == mine


def test_the_digest_would_tell(monkeypatch: pytest.MonkeyPatch, mine: str) -> None:
    """One bit of one activation is enough."""
    rows = one_node.Product.rows

    def other(product: one_node.Product, count: int, seed: int = 7) -> one_node.Floats:
        found = rows(product, count, seed)
        found.view("uint32")[0, -1, -1] ^= 1
        return found

    monkeypatch.setattr(one_node.Product, "rows", other)
    assert one_node.digest() != mine
