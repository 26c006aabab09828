"""The kernels against float64: compiled for the processor and run by the emulator, and on a CUDA device if any."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from specexport.engines.plugins.tree_attention import toolchain
from specexport.engines.plugins.tree_attention.library import Call, Library, workspace_bytes
from specexport.runtime.errors import SpecExportError
from tests.engines.plugins.tree_attention.cases import (
    Case,
    Values,
    attention,
    expected_rows,
    make_values,
    random_case,
)
from tests.engines.plugins.tree_attention.memory import CudaMemory, HostMemory, prepare

#: (multiprocessors, shared memory of a block): one split and many, one stage and two.
DEVICES = [(1, 64 * 1024), (24, 99 * 1024), (132, 227 * 1024)]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Library:
    compiler = toolchain.find_host_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler: g++, c++ or clang++ (or CXX)")
    return Library(toolchain.build_emulated(tmp_path_factory.mktemp("emulated") / "kernels.so", compiler))


@pytest.fixture(scope="module")
def on_device(tmp_path_factory: pytest.TempPathFactory) -> Library:
    torch, nvcc = pytest.importorskip("torch"), toolchain.find_nvcc()
    if not torch.cuda.is_available() or nvcc is None:
        pytest.skip("needs a CUDA device, a torch that drives it, and nvcc")
    major, minor = torch.cuda.get_device_capability()
    return Library(toolchain.build_device(tmp_path_factory.mktemp("device") / "kernels.so", nvcc, [major * 10 + minor]))


Check = Callable[[Case], None]


@pytest.fixture(params=["emulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def check(request: pytest.FixtureRequest) -> Iterator[Check]:
    """Run a case and hold it against the reference."""
    if request.param == "cuda":
        library = request.getfixturevalue("on_device")
        yield lambda case: run_and_compare(library, CudaMemory(), case)
    else:
        library = request.getfixturevalue("emulated")

        def emulate(case: Case) -> None:
            processors, shared = DEVICES[case.seed % len(DEVICES)]
            library.emulate(processors, shared, reverse=case.seed // 3 % 2 == 1)
            run_and_compare(library, HostMemory(), case)

        yield emulate
        library.emulate(4, 99 * 1024, reverse=False)


def run_and_compare(library: Library, memory: HostMemory, case: Case) -> None:
    values = make_values(case)
    call = prepare(library, memory, case, values)
    library.enqueue(call)
    memory.finish()
    memory.check_guards()
    caches = [memory.get(call.cache_k), memory.get(call.cache_v)]
    scales = [memory.get(call.scale_k), memory.get(call.scale_v)] if call.cache else values.scales
    compare_caches(case, values, caches, scales)
    output = memory.get(call.output).astype(np.float64)
    expected, bound = attention(case, values, caches, scales)
    assert (np.abs(output - expected) <= bound).all(), f"{case}: {(np.abs(output - expected) / bound).max()} bounds"


def compare_caches(case: Case, values: Values, caches: list, scales: list) -> None:  # type: ignore[type-arg]
    expected, expected_scales, source = expected_rows(case, values)
    moved = source < case.slots
    for cache, scale, rows, row_scales in zip(caches, scales, expected, expected_scales, strict=True):
        bits = f"u{cache.dtype.itemsize}"
        if case.cache == "element":
            assert np.array_equal(cache.view(bits), rows.view(bits)), case
            continue
        assert np.array_equal(cache.view(bits)[:, moved], rows.view(bits)[:, moved]), case
        assert np.array_equal(scale[:, moved], row_scales[:, moved], equal_nan=True), case
    if case.cache != "element":
        for cache, scale, new in zip(caches, scales, (values.key, values.value), strict=True):
            rows = new[:, source[~moved] - case.slots].astype(np.float64)
            error = np.abs(cache[:, ~moved].astype(np.float64) * scale[:, ~moved, None].astype(np.float64) - rows)
            largest = np.abs(rows).max(axis=-1, keepdims=True)
            # Half a step: of 127 equal ones, or of 3 bits behind the leading one (2^-9 of 448 for the smallest).
            step = largest / 127 if case.cache == "int8" else np.maximum(np.abs(rows) / 8, largest / 448 / 512)
            assert (error <= step * 0.5 * 1.001).all(), case


SMALL = [random_case(seed, most_nodes=40, most_past=300) for seed in range(40)]
CHOSEN = [
    Case(seed=1000, nodes=1, past=0, slots=1),
    Case(seed=1001, nodes=1, past=63, slots=64, heads=3, kv_heads=3, head_dim=80),
    Case(seed=1002, nodes=33, past=31, slots=200, heads=8, head_dim=128),
    Case(seed=1003, nodes=64, past=1000, slots=1200, heads=4, head_dim=64, window=1, element="bf16"),
    Case(seed=1004, nodes=5, past=700, slots=1024, heads=8, head_dim=256, cache="e4m3", window=100),
    Case(seed=1006, nodes=257, past=100, slots=400, window=300),
    Case(seed=1005, nodes=8, past=2048, slots=2100, heads=4, head_dim=128, cache="int8", element="bf16"),
]


@pytest.mark.parametrize("case", [*CHOSEN, *SMALL], ids=lambda case: str(case.seed))
def test_call(check: Check, case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_call_of_any_size(check: Check, seed: int) -> None:
    """T up to 128 over up to 4096 committed rows."""
    check(random_case(seed))


#: What is changed in a source file: missing barriers and waits show in one order of threads or the other.
FAULTS = {
    "commit writes before all rows are staged": (
        "commit.cuh",
        "    sync_block();\n    const long long write",
        "    const long long write",
    ),
    "tile is read before it is there": ("attend.cuh", "            wait_async<0>();", "            wait_async<1>();"),
    "tile is read before the other threads copied": (
        "attend.cuh",
        "        sync_block();\n        if (kCodes) {",
        "        if (kCodes) {",
    ),
    "tile is overwritten while it is read": (
        "attend.cuh",
        "        sync_block();\n        if (p.stages == 1",
        "        if (p.stages == 1",
    ),
    "channel groups swapped": ("attend.cuh", "key + k * 16);", "key + (k ^ 1) * 16);"),
    "half of a tree word": ("attend.cuh", "(other & 31)", "(other & 15)"),
    "a node counted as committed": ("attend.cuh", "if (column < range.past)", "if (column <= range.past + 1)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str, tmp_path: Path) -> None:
    """The emulator and the reference notice what is wrong in the kernels."""
    compiler = toolchain.find_host_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    name, before, after = FAULTS[fault]
    source = tmp_path / "source"
    shutil.copytree(toolchain.SOURCE, source)
    text = (source / name).read_text()
    assert text.count(before) == 1
    (source / name).write_text(text.replace(before, after))
    library = Library(toolchain.build_emulated(tmp_path / "kernels.so", compiler, source))
    caught = 0
    for case in [*CHOSEN, *SMALL]:
        library.emulate(*DEVICES[case.seed % len(DEVICES)], reverse=case.seed // 3 % 2 == 1)
        try:
            run_and_compare(library, HostMemory(), case)
        except AssertionError:
            caught += 1
    assert caught


REFUSED = [
    ({"head_dim": 72}, "head_dim is none of 64, 80, 96, 128, 256"),
    ({"nodes": 0}, "a size is not positive"),
    ({"slots": -1}, "a size is not positive"),
    ({"slots": 1 << 30}, "a size is not positive or too large"),
    ({"heads": 3, "kv_heads": 2}, "heads are no multiple of kv_heads"),
    ({"committed": -1}, "a size is not positive"),
    ({"committed": 4000}, "more committed rows than shared memory holds"),
    ({"window": -1}, "a size is not positive"),
    ({"element": 2}, "unknown element or cache type"),
    ({"cache": 3}, "unknown element or cache type"),
    ({"cache": 1}, "a tensor is missing"),
    ({"query": 0}, "a tensor is missing"),
    ({"cache_k": 8}, "not aligned to 16 bytes"),
    ({"workspace": 0}, "a tensor is missing"),
    ({"workspace_bytes": 8}, "the workspace is smaller"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(changes) for changes, _ in REFUSED])
def test_what_no_kernel_takes_is_refused(emulated: Library, changes: dict[str, int], message: str) -> None:
    case = Case(seed=1, nodes=4, past=200, heads=2, kv_heads=2)
    emulated.emulate(24, 99 * 1024, reverse=False)
    memory = HostMemory()
    call = prepare(emulated, memory, case, make_values(case), **changes)
    with pytest.raises(SpecExportError, match=message):
        emulated.enqueue(call)
    assert np.isnan(memory.get(call.output).astype(np.float32)).all()


def test_rows_out_of_range_are_skipped(emulated: Library) -> None:
    """Whatever stands in the index tensors, nothing outside the buffers is touched."""
    case = Case(seed=2, nodes=5, past=40, slots=64, heads=2, kv_heads=1)
    for past, write, commit, order in [
        (1 << 30, 1 << 30, [-5, 1 << 30], [0, 1, 2, 3, 4, 5, 6]),
        (-7, -3, [0, 63], [-1, 9, 1 << 30, 6, 5, 4, 3]),
        (62, 60, [64, -64], [6, 5, 4, 3, 2, 1, 0]),
    ]:
        values = make_values(case)
        values.past, values.write = past, write
        values.commit, values.order = np.array(commit, np.int32), np.array(order, np.int32)
        memory = HostMemory()
        emulated.enqueue(prepare(emulated, memory, case, values))
        memory.check_guards()


@pytest.mark.parametrize("past", [3, 500])
def test_attention_reads_the_used_rows_once(emulated: Library, past: int) -> None:
    """Of 4096 slots only the used ones, and those once for the four heads that share them."""
    emulated.emulate(24, 99 * 1024, reverse=False)
    case = Case(seed=3, nodes=8, past=past, heads=8, kv_heads=2, slots=4096)
    emulated.emulated_reads()
    run_and_compare(emulated, HostMemory(), case)
    assert emulated.emulated_reads() == 2 * case.kv_heads * (past + case.nodes) * case.head_dim * 2


def test_attention_reads_the_window_alone(emulated: Library) -> None:
    emulated.emulate(24, 99 * 1024, reverse=False)
    case = Case(seed=4, nodes=8, past=3000, slots=4096, window=100)
    emulated.emulated_reads()
    run_and_compare(emulated, HostMemory(), case)
    rows = emulated.emulated_reads() // (2 * case.head_dim * 2)
    seen = case.window - 1 + case.nodes
    assert seen <= rows < seen + 64, "and less than a tile before it"


def test_workspace_without_a_library(emulated: Library) -> None:
    for seed in range(60):
        case = random_case(seed)
        call = Call(
            nodes=case.nodes, heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, slots=case.slots
        )
        sizes = (case.nodes, case.heads, case.kv_heads, case.head_dim, case.slots)
        assert emulated.workspace(call) == workspace_bytes(*sizes)


def test_a_library_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kernels.so").write_bytes(b"nothing")
    with pytest.raises(SpecExportError, match=r"kernels\.so is no library of the TreeAttention kernels"):
        Library(tmp_path / "kernels.so")
