"""The phases of ``gpu_check.py``, one a process: ``gpu_phases.py PHASE RESULT FOLDER [--bundle BUNDLE]``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.engines.cuda import Buffer, Device
from specexport.engines.plugins.tree_attention import toolchain
from specexport.engines.plugins.tree_attention.library import CACHES, ELEMENTS, Call, Library
from specexport.exporter.verify import PROMPTS, limit_of
from specexport.runtime import Bundle, SamplingParams, Session
from specexport.runtime.cache import common_prefix
from specexport.runtime.engine import Step, SummarisingEngine, TargetEngine, find_engine, widest_of
from specexport.runtime.errors import SpecExportError, UsageError
from specexport.runtime.manifest import TargetInfo

ROOT = Path(__file__).resolve().parent.parent
NODES = (1, 2, 4, 8, 16, 32, 64)
#: Timed shape: an 8B model's layer.
HEADS, KV_HEADS, HEAD_DIM, SLOTS, USED = 32, 8, 128, 8192, (512, 2048, 4096)
KERNEL_CASES, NEW_TOKENS, PAST, COPY_BYTES = 60, 48, 256, 512 << 20
_ACTIVATION_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def attention_bytes(nodes: int, used: int, heads: int, kv_heads: int, head_dim: int, element: int = 2) -> int:
    """Least that one call must move: cached keys and values read; new ones read, written; queries in, results out."""
    cached = 2 * kv_heads * used * head_dim
    new = 2 * 2 * kv_heads * nodes * head_dim
    return element * (cached + new + 2 * heads * nodes * head_dim)


def step_bytes(weights: int, target: TargetInfo, nodes: int, used: int) -> int:
    """Least that a step must move: the weights once, the caches' used rows, new rows and float32 logits written."""
    row = 2 * target.layers * target.kv_heads * target.head_dim * _ACTIVATION_BYTES[target.precision.activations]
    return weights + row * (used + nodes) + 4 * nodes * target.vocab_size


def judge(
    mine: Sequence[int], other: Sequence[int], row_at: Callable[[int], NDArray[np.float32]], limit: float
) -> tuple[bool, str]:
    """Compare two outputs of one prompt by the margin rule; whether it passes, and in words.

    Args:
        mine: the reference's. row_at: its logits [V] for the token of an index, given those before it.
        limit: largest gap, relative to the largest logit of the row (or 1).
    """
    at = common_prefix(mine, other)
    if at == len(mine) == len(other):
        return True, "equal"
    if at == min(len(mine), len(other)):
        return False, f"one ends after {at} tokens"
    row = row_at(at).astype(np.float64)
    gap = float(row[mine[at]] - row[other[at]]) / max(1.0, float(np.abs(row).max()))
    passes = 0 <= gap <= limit
    return passes, f"token {at} differs by a margin of {gap:.1e} ({'within' if passes else 'past'} {limit:g})"


def timed(device: Device, work: Callable[[], None], calls: int = 20, rounds: int = 15) -> float:
    """Seconds of ``work``, the fastest round of a graph of several calls: launches of the host are not in it."""
    work()
    device.wait()

    def several() -> None:
        for _ in range(calls):
            work()

    replay = device.capture(several)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        replay.launch()
        device.wait()
        best = min(best, time.perf_counter() - start)
    return best / calls


def put(device: Device, array: NDArray[Any]) -> Buffer:
    """An array in device memory."""
    data = np.ascontiguousarray(array)
    buffer, staging = device.allocate(data.nbytes, "a test"), device.pinned(data.nbytes)
    staging.array(np.dtype(np.uint8), (data.nbytes,))[:] = data.reshape(-1).view(np.uint8)
    device.upload(buffer.address, staging.address, data.nbytes)
    device.wait()
    return buffer


def phase_device(folder: Path, bundle: Path | None) -> dict[str, Any]:
    device = Device()
    size = COPY_BYTES
    source, target = device.allocate(size, "a copy"), device.allocate(size, "a copy")
    device.zero(source.address, size)
    seconds = timed(device, lambda: device.copy(target.address, source.address, size), calls=5)
    rate = 2 * size / seconds  # read and written
    found = {"name": device.name, "capability": device.capability, "copy_gb_s": rate / 1e9}
    (folder / "device.figures").write_text(json.dumps(found))
    return found


def copy_rate(folder: Path) -> float:
    """Bytes a second, as :func:`phase_device` measured."""
    return float(json.loads((folder / "device.figures").read_text())["copy_gb_s"]) * 1e9


def phase_compile_kernels(folder: Path, bundle: Path | None) -> dict[str, Any]:
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        raise UsageError("no nvcc: install a CUDA toolkit, or pip install 'specexport[kernels]'")
    architecture = int(Device().capability.replace(".", ""))
    path = toolchain.build_device(folder / "kernels.so", nvcc, [architecture])
    return {"nvcc": str(nvcc.path), "architecture": architecture, "bytes": path.stat().st_size}


def kernels(folder: Path) -> Library:
    if not (folder / "kernels.so").is_file():
        raise UsageError("the kernels were not compiled")
    return Library(folder / "kernels.so")


def phase_test_kernels(folder: Path, bundle: Path | None) -> dict[str, Any]:
    """The repository's own cases against float64, on the device."""
    library = kernels(folder)
    try:
        import torch
    except ImportError:
        torch = None  # type: ignore[assignment]
    if torch is None or not torch.cuda.is_available():
        raise UsageError("the tests put their tensors on the device by a torch with CUDA, which is not installed")
    sys.path.insert(0, str(ROOT))
    from tests.engines.plugins.tree_attention.cases import random_case
    from tests.engines.plugins.tree_attention.memory import CudaMemory
    from tests.engines.plugins.tree_attention.test_kernel import run_and_compare

    for seed in range(KERNEL_CASES):
        run_and_compare(library, CudaMemory(), random_case(seed))
    return {"cases": KERNEL_CASES}


def phase_time_kernels(folder: Path, bundle: Path | None) -> dict[str, Any]:
    library, device, rate = kernels(folder), Device(), copy_rate(folder)
    rng = np.random.default_rng(0)

    def random(*shape: int) -> Buffer:
        return put(device, rng.standard_normal(shape, np.float32).astype(np.float16))

    caches = [random(KV_HEADS, SLOTS, HEAD_DIM) for _ in range(2)]
    rows = []
    for used in USED:
        for nodes in NODES:
            held = {name: random(heads, nodes, HEAD_DIM) for name, heads in
                    (("query", HEADS), ("key", KV_HEADS), ("value", KV_HEADS), ("output", HEADS))}  # fmt: skip
            held |= {name: put(device, array) for name, array in _chain(nodes, used).items()}
            call = Call(
                nodes=nodes, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, slots=SLOTS, committed=0,
                element=ELEMENTS["fp16"], cache=CACHES["element"], scale=HEAD_DIM**-0.5,
                cache_k=caches[0].address, cache_v=caches[1].address,
                **{name: buffer.address for name, buffer in held.items()},
            )  # fmt: skip
            call.workspace_bytes = library.workspace(call)
            workspace = device.allocate(call.workspace_bytes, "the workspace")
            call.workspace = workspace.address
            seconds = timed(device, lambda call=call: library.enqueue(call, device.stream))  # type: ignore[misc]
            share = attention_bytes(nodes, used, HEADS, KV_HEADS, HEAD_DIM) / seconds / rate
            other = torch_attention(nodes, used)
            rows.append({"nodes": nodes, "used": used, "us": seconds * 1e6, "share": share,
                         "torch_us": None if other is None else other * 1e6})  # fmt: skip
    return {"rows": rows}


def _chain(nodes: int, used: int) -> dict[str, NDArray[Any]]:
    """A chain behind ``used`` rows, nothing to commit, in the kernels' types."""
    bits = np.zeros((nodes, -(-nodes // 32) * 32), np.uint8)
    bits[:, :nodes] = np.tri(nodes)
    return {
        "tree": np.packbits(bits, axis=1, bitorder="little").view(np.uint32),
        "positions": np.arange(used, used + nodes, dtype=np.int32),
        "past": np.array([used], np.int32),
        "write": np.array([used], np.int32),
        "commit": np.zeros(1, np.int32),
        "order": np.arange(nodes, dtype=np.int32),
    }


def torch_attention(nodes: int, used: int) -> float | None:
    """Seconds of torch's attention with the same mask over as many rows; None without a torch that has CUDA."""
    try:
        import torch
        from torch.nn.functional import scaled_dot_product_attention
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    rows = used + nodes
    query = torch.randn(1, HEADS, nodes, HEAD_DIM, device="cuda", dtype=torch.float16)
    key, value = (torch.randn(1, KV_HEADS, rows, HEAD_DIM, device="cuda", dtype=torch.float16) for _ in range(2))
    mask = torch.zeros(1, 1, nodes, rows, device="cuda", dtype=torch.float16)
    mask[..., used:].masked_fill_(~torch.ones(nodes, nodes, device="cuda", dtype=torch.bool).tril(), float("-inf"))

    def work() -> None:
        scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph, calls, best = torch.cuda.CUDAGraph(), 20, float("inf")
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    for _ in range(15):
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best / calls


def phase_engine(name: str, folder: Path, path: Path | None) -> dict[str, Any]:
    """Tokens and step times of a bundle on an engine."""
    bundle = Bundle.load(path) if path else _demo()
    target, rate = bundle.manifest.target, copy_rate(folder)
    engine = find_engine(name)(bundle.path)
    reference = find_engine("onnxruntime-cpu")(bundle.path)
    limit, verdicts = limit_of(target), []
    for text in PROMPTS:
        prompt = bundle.tokenizer.encode(text)[: target.slots - NEW_TOKENS]
        mine = _generate(bundle, reference, "none", prompt)
        for drafter in ("none", "suffix"):
            other = _generate(bundle, engine, drafter, prompt)
            verdicts.append(judge(mine, other, lambda at: _row(reference, [*prompt, *mine[:at]]), limit))  # noqa: B023
    wrong = [words for passes, words in verdicts if not passes]
    if wrong:
        raise SpecExportError(f"{len(wrong)} of {len(verdicts)} outputs are wrong, the first: {wrong[0]}")
    equal = sum(words == "equal" for _, words in verdicts)
    tokens = (
        f"{equal} of {len(verdicts)} outputs equal to the CPU's, the others within {limit:g} at their first difference"
    )
    files = (bundle.path / part for part in bundle.manifest.files if part.startswith("target.onnx"))
    weights = sum(file.stat().st_size for file in files)
    used = min(PAST, target.slots // 2)
    widths = [nodes for nodes in NODES if nodes <= widest_of(engine)(used)]
    seconds = {nodes: _step(engine, nodes, used) for nodes in widths}
    steps = [
        {"nodes": nodes, "ms": time_ * 1e3, "of_one": time_ / seconds[1],
         "of_bound": time_ / (step_bytes(weights, target, nodes, used) / rate)}
        for nodes, time_ in seconds.items()
    ]  # fmt: skip
    return {"tokens": tokens, "bundle": bundle.path.name, "steps": steps}


def _demo() -> Bundle:
    from specexport.exporter.demo import demo_bundle
    from specexport.exporter.progress import Progress

    return demo_bundle(Progress(quiet=True))


def _generate(bundle: Bundle, engine: TargetEngine, drafter: str, prompt: list[int]) -> list[int]:
    found = Session(bundle, engine=engine, drafter=drafter).generate(prompt, SamplingParams(max_tokens=NEW_TOKENS))
    return found.token_ids


def _row(engine: TargetEngine, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Logits after ``tokens``, from nothing."""
    return engine.run(Step.chain(tokens, select=[len(tokens) - 1]))[0].copy()


def _step(engine: TargetEngine, nodes: int, used: int, rounds: int = 12) -> float:
    """Seconds of a call as decoding makes it, the fastest."""
    run = engine.run_rows if isinstance(engine, SummarisingEngine) else engine.run
    step, best = Step.chain(range(nodes), used), float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        run(step)
        best = min(best, time.perf_counter() - start)
    return best


def outcome(phase: str, folder: Path, bundle: Path | None) -> Mapping[str, Any]:
    """``figures``, or ``skipped`` where something is not there, or ``failed``."""
    found: Callable[[Path, Path | None], dict[str, Any]] | None = globals().get(f"phase_{phase}")
    try:
        return {"figures": found(folder, bundle) if found else phase_engine(phase, folder, bundle)}
    except UsageError as error:
        return {"skipped": str(error)}
    except (SpecExportError, AssertionError) as error:
        # A bundle without plans was not compiled for this device: nothing to check, and the message says how to.
        missing = "no plan of this bundle runs" in str(error)
        return {"skipped" if missing else "failed": (str(error).splitlines() or ["an assertion"])[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase")
    parser.add_argument("result", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bundle", type=Path)
    arguments = parser.parse_args()
    found = outcome(arguments.phase, arguments.folder, arguments.bundle)
    arguments.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
