"""Compile the TreeAttention kernels for every GPU architecture and show what each uses.

    python scripts/compile_kernels.py [--arch 87 ...] [--head-dim 128 ...] [--library kernels.so]

Needs nvcc: a CUDA toolkit (on the path, CUDA_HOME, /usr/local/cuda), or ``pip install 'specexport[kernels]'``. Exits
with 1 if a kernel of the main head widths, 64 and 128, keeps registers in memory (spills).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from specexport.engines.plugins.tree_attention import HEAD_DIMS, toolchain
from specexport.runtime.errors import SpecExportError

#: Widths that must not spill.
MAIN_HEAD_DIMS = (64, 128)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", help="Compute capabilities, 89 for 8.9 (default: all).")
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEAD_DIMS, help="Head widths (default: all).")
    parser.add_argument("--library", type=Path, help="Also build a shared library with these architectures.")
    arguments = parser.parse_args()
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        raise SpecExportError("no nvcc found: install a CUDA toolkit, or pip install 'specexport[kernels]'")
    known = toolchain.known_architectures(nvcc)
    if unknown := set(arguments.arch or ()) - set(known):
        raise SpecExportError(f"{nvcc.path} compiles for {known}, not {sorted(unknown)}")
    spilled = [kernel for arch in arguments.arch or known for kernel in compile_one(nvcc, arch, arguments.head_dim)]
    if arguments.library is not None:
        toolchain.build_device(arguments.library, nvcc, arguments.arch or known)
        print(f"{arguments.library}: {arguments.library.stat().st_size / 1e6:.1f} MB")
    for kernel in spilled:
        print(f"spills: sm_{kernel.architecture} {kernel.kernel}", file=sys.stderr)
    return 1 if spilled else 0


def compile_one(nvcc: toolchain.Nvcc, arch: int, head_dims: list[int] | None) -> list[toolchain.Resources]:
    """Compile for one architecture, print a table, and return the kernels that should not spill and do."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = {
            kernel.kernel: kernel
            for head_dim in head_dims or [None]
            for kernel in toolchain.measure(nvcc, arch, Path(folder) / "kernels.cubin", head_dim)
        }
    print(f"sm_{arch} ({time.perf_counter() - start:.0f} s)")
    print(f"  {'kernel':<32}{'registers':>10}{'stack':>7}{'spilled':>9}")
    for kernel in sorted(found.values(), key=lambda kernel: kernel.kernel):
        print(f"  {kernel.kernel:<32}{kernel.registers:>10}{kernel.stack:>7}{kernel.spilled:>9}", flush=True)
    return [kernel for kernel in found.values() if kernel.spilled and kernel.head_dim in MAIN_HEAD_DIMS]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SpecExportError as error:
        sys.exit(f"error: {error}")
