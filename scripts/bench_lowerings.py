"""Milliseconds a step of four ways to attend on ONNX Runtime's CPU provider, by cache size and used length.

    python scripts/bench_lowerings.py CHECKPOINT [--threads 2] [--slots 1024 4096]

``attention`` is the exported graph as it is (Attention over all S slots), ``slice`` cuts its caches and mask to the
used rows first, ``grouped`` is the lowering that bundles carry. Variants alternate in one process; medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx_ir.passes import common as passes

from specexport.engines.ort import TARGET_FILE, OrtEngine, physical_cores
from specexport.exporter.checkpoint import open_checkpoint
from specexport.exporter.config import read_config
from specexport.exporter.lower import lower_target
from specexport.exporter.onnx import export_target, save_target
from specexport.exporter.quantize.plan import FLOATS
from specexport.runtime import contract
from specexport.runtime.engine import Step

WIDTHS = (1, 8, 64)


def slice_caches(model: ir.Model) -> ir.Model:
    """Cut caches and masks to ``past + T`` columns in front of every Attention."""
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}

    def constant(name: str, value: list[int]) -> ir.Value:
        tensor = ir.tensor(np.array(value), name=name)
        found = ir.Value(name=name, const_value=tensor, shape=ir.Shape([len(value)]), type=ir.TensorType(tensor.dtype))
        graph.initializers[name] = found
        return found

    zero, rows, columns = constant("s_zero", [0]), constant("s_rows", [2]), constant("s_columns", [3])
    count = ir.node("Shape", [inputs[contract.TOKENS]], {"start": 1, "end": 2})
    used = ir.node("Add", [inputs[contract.PAST], count.outputs[0]])
    graph.insert_before(graph[0], [count, used])
    for node in [node for node in graph if node.op_type == "Attention"]:
        for index, axis in ((1, rows), (2, rows), (3, columns)):
            cut = ir.node("Slice", [node.inputs[index], zero, used.outputs[0], axis])
            graph.insert_before(node, cut)
            node.replace_input_with(index, cut.outputs[0])
    passes.TopologicalSortPass()(model)
    return model


def step(engine: OrtEngine, width: int, past: int) -> float:
    """Seconds of one call with ``width`` nodes behind ``past`` rows."""
    call = Step.chain(range(width), past)
    start = time.perf_counter()
    engine.run(call)
    return time.perf_counter() - start


def variants(checkpoint: str, slots: int, folder: Path, threads: int) -> dict[str, OrtEngine]:
    opened = open_checkpoint(checkpoint)
    config = read_config(opened.config)
    model, target = export_target(config, slots, FLOATS["fp32"])
    plain, sliced = folder / f"plain-{slots}", folder / f"sliced-{slots}"
    plain.mkdir()
    sliced.mkdir()
    save_target(model, target, opened.weights, plain / TARGET_FILE)
    lower_target(plain, config, slots, "fp32")
    ir.save(slice_caches(ir.load(plain / TARGET_FILE)), sliced / TARGET_FILE)
    (sliced / (TARGET_FILE + ".data")).hardlink_to(plain / (TARGET_FILE + ".data"))
    return {
        "attention": OrtEngine(plain, threads=threads, lowered=False),
        "slice": OrtEngine(sliced, threads=threads),
        "grouped": OrtEngine(plain, threads=threads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--slots", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    threads = arguments.threads or physical_cores()
    print(
        f"onnxruntime {onnxruntime.__version__}, {threads} threads, fp32, {platform.processor() or platform.machine()}"
    )
    print(f"{'S':>5} {'variant':>10} {'used':>6} " + " ".join(f"{f'T={width}':>8}" for width in WIDTHS))
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for slots in arguments.slots:
            engines = variants(arguments.checkpoint, slots, Path(folder), threads)
            for past in [used for used in (64, 512, 2048, slots - 64) if used <= slots - 64]:
                times: dict[tuple[str, int], list[float]] = {}
                for _ in range(arguments.repeats + 2):
                    for width in WIDTHS:
                        for name, engine in engines.items():
                            times.setdefault((name, width), []).append(step(engine, width, past))
                for name in engines:
                    medians = [1e3 * statistics.median(times[name, width][2:]) for width in WIDTHS]
                    print(f"{slots:>5} {name:>10} {past:>6} " + " ".join(f"{value:8.1f}" for value in medians))
                    records.append(
                        {"slots": slots, "variant": name, "used": past, "ms": dict(zip(WIDTHS, medians, strict=True))}
                    )
            del engines
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=2))


if __name__ == "__main__":
    main()
