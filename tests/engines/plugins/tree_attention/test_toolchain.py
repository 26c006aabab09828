"""The kernels compile without spills where there is an nvcc, and what its assembler says is understood."""

from __future__ import annotations

from pathlib import Path

import pytest

from specexport.engines.plugins.tree_attention import toolchain
from specexport.engines.plugins.tree_attention.toolchain import Nvcc, Resources
from specexport.runtime.errors import SpecExportError

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN14tree_attention6attendINS_4Bf16ELi80ELb1EEEvNS_7ProblemE' for 'sm_75'
ptxas info    : Function properties for _ZN14tree_attention6attendINS_4Bf16ELi80ELb1EEEvNS_7ProblemE
    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 560 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN14tree_attention7combineINS_4Fp16EEEvNS_7ProblemE' for 'sm_75'
ptxas info    : Function properties for _ZN14tree_attention7combineINS_4Fp16EEEvNS_7ProblemE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 560 bytes cmem[0]
"""


def test_the_assemblers_log_is_read() -> None:
    assert list(toolchain.parse_resources(LOG, 75)) == [
        Resources(75, "attend<Bf16, 80, codes>", 80, 255, 24, 20),
        Resources(75, "combine<Fp16>", 0, 40, 0, 0),
    ]


@pytest.fixture(scope="module")
def nvcc() -> Nvcc:
    found = toolchain.find_nvcc()
    if found is None:
        pytest.skip("no nvcc: install a CUDA toolkit or the extra 'kernels'")
    return found


@pytest.mark.parametrize("head_dim", [64, 128])
def test_main_kernels_do_not_spill(nvcc: Nvcc, head_dim: int, tmp_path: Path) -> None:
    kernels = toolchain.measure(nvcc, 89, tmp_path / "kernels.cubin", head_dim)
    attending = [kernel for kernel in kernels if kernel.head_dim == head_dim]
    assert len(attending) == 4 and len(kernels) == 10
    assert not [kernel for kernel in kernels if kernel.spilled or kernel.stack]
    # Three blocks of 128 threads on a multiprocessor, as far as registers go.
    assert max(kernel.registers for kernel in attending) <= 168


@pytest.mark.slow
def test_every_architecture_compiles(nvcc: Nvcc, tmp_path: Path) -> None:
    known = toolchain.known_architectures(nvcc)
    assert {75, 86, 87, 89} <= set(known)
    for architecture in known:
        kernels = toolchain.measure(nvcc, architecture, tmp_path / "kernels.cubin")
        assert len(kernels) == 26
        assert not [kernel for kernel in kernels if kernel.spilled and kernel.head_dim in (64, 128)]


def test_a_compiler_that_fails_is_reported(tmp_path: Path) -> None:
    compiler = toolchain.find_host_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    with pytest.raises(SpecExportError, match=r"failed with 1: .*error"):
        toolchain.build_emulated(tmp_path / "missing" / "kernels.so", compiler)


def test_nvcc_of_a_named_toolkit_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert toolchain.find_nvcc() == Nvcc(tmp_path / "bin" / "nvcc")
