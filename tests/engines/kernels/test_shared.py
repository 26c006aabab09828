"""Matrices that several nodes multiply with: kept once, and never taken for others."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.engines.kernels.library import kernels_library
from tests.engines.kernels.grow_node import Head
from tests.engines.kernels.one_node import Floats, Product, needs_kernels

pytestmark = needs_kernels

RunPython = Callable[..., subprocess.CompletedProcess[str]]

#: Memory that sessions take, of nodes with equal matrices in tensors of their own and with different ones.
MEMORY = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import numpy as np, onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from tests.engines.kernels.one_node import Product, kernels_library, DOMAIN

NODES, SIZE = 16, 2048

def model(seeds):
    nodes, constants, outputs = [], [], []
    for number, seed in enumerate(seeds):
        product = Product(SIZE, SIZE, 32, seed=seed, row_scales=True)
        names = [f"{name}{number}" for name in product.stored]
        constants += [numpy_helper.from_array(x, name) for x, name in zip(product.stored.values(), names)]
        inputs, output = ["x", *names], f"y{number}"
        nodes.append(helper.make_node("QuantizedProduct", inputs, [output], domain=DOMAIN, **product.attributes))
        outputs.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, None))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, SIZE])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph(nodes, "many", [x], outputs, constants)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()

def used():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def taken(data):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False  # it grows by doubling
    options.register_custom_ops_library(str(kernels_library()))
    before = used()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    taken = used() - before
    rows = session.run(None, {"x": np.ones((1, SIZE), np.float32)})
    return session, taken / SIZE**2, len({row.tobytes() for row in rows})

kept = [taken(model(seeds)) for seeds in ([0] * NODES, [0] * NODES, range(1, NODES + 1))]
for _, matrices, results in kept:
    print(matrices, results)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux, which says what memory is used")
def test_nodes_with_equal_matrices_take_the_memory_of_one(run_python: RunPython) -> None:
    """In matrices' sizes: onnxruntime keeps the tensors of all 16 nodes, ours are one or 16 on top. What an allocator
    gives back it gives back at once, and what a process needs once is a few sizes of the first session."""
    root = str(Path(__file__).parents[3])
    environment = {"SPECEXPORT_KERNELS": str(kernels_library()), "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = run_python("-c", MEMORY, root, **environment)
    assert done.returncode == 0, done.stderr
    (equal, one), (again, _), (different, many) = (map(float, line.split()) for line in done.stdout.splitlines())
    assert (one, many) == (1, 16)
    assert different > max(equal + 8, again + 12)
    assert 15 < again < 22  # a second session of the same


def rows_of(product: Product) -> Floats:
    return np.random.default_rng(1).standard_normal((1, 3, product.width)).astype(np.float32)


#: Matrices whose bytes are equal, or nearly, and that are not.
ALIKE = {
    "gates of two panels": [Product(32, 128, gate=gate) for gate in (0, 1, 2)],
    "gates": [Product(96, 128, gate=gate) for gate in (0, 1, 2)],
    "blocks": [Product(48, 256, block, row_scales=True) for block in (16, 32, 64, 128, 256)],
    "blocks of 4 bits": [Product(48, 256, block, 4, row_scales=True) for block in (32, 64)],
    "widths": [Product(48, width, 64, row_scales=True) for width in (256, 250)],
    "seeds": [Product(48, 256, seed=seed) for seed in (0, 1)],
}


@pytest.mark.parametrize("name", ALIKE)
def test_others_are_not_taken_for_equal(name: str) -> None:
    """What each gives while nothing else is there, it gives beside the others; and they differ."""
    base = ALIKE[name][0]
    codes, scales, zeros = base._parts

    def made(product: Product) -> Product:
        """The very codes of the first, cut into other blocks."""
        fresh = replace(product)
        if product.seed == base.seed:
            parts = [scales[:, :1].repeat(fresh.blocks, 1), zeros[:, :1].repeat(fresh.blocks, 1)]
            same = parts if product.block != base.block else [scales, zeros]
            fresh.__dict__["_parts"] = (codes[:, : product.width], *same)
        return fresh

    alone: list[Any] = []
    for product in ALIKE[name]:
        alone.append(made(product).run(rows_of(product))[0])
        gc.collect()  # the session went with its product
    together = [made(product) for product in ALIKE[name]]
    for product in together:  # all are there before the first is run
        product.run(rows_of(product))
    for product, wanted in zip(together, alone, strict=True):
        assert np.array_equal(product.run(rows_of(product))[0], wanted)
    assert len({rows.tobytes() for rows in alone}) == len(alone)


def test_a_matrix_outlives_the_session_that_made_it() -> None:
    product = Product(96, 256)
    first, second = replace(product), replace(product)
    wanted = first.run(rows_of(product))[0]
    assert np.array_equal(second.run(rows_of(product))[0], wanted)
    del first
    gc.collect()
    for _ in range(8):  # what would take the place of memory that was given back
        other = Product(96, 256, seed=9)
        other.run(rows_of(other))
    assert np.array_equal(second.run(rows_of(product))[0], wanted)


def test_trees_are_the_same_beside_another_session() -> None:
    """The lm_head, the only matrix that both have, is one; so are all matrices of equal heads."""
    head = Head()
    call = head.call()
    alone = head.run(call)
    lm_head = head.matrices["lm_head"]
    product = replace(lm_head)
    product.run(rows_of(product))
    twin, other = replace(head, topk=2), Head(seed=1)
    assert not other.run(other.call()).same(alone)
    assert len(twin.run(call).tokens) == head.nodes and head.run(call).same(alone)
    assert replace(head).run(call).same(alone)
