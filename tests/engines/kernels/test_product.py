"""``specexport::QuantizedProduct`` beside sums of whole numbers, and that a row is nobody else's business."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.engines.kernels.one_node import Floats, Product, needs_kernels

pytestmark = needs_kernels

Doubles = NDArray[np.float64]


def normed(product: Product, x: Floats, skip: Floats | None) -> Floats:
    """What the product multiplies with."""
    if skip is not None:
        x = x + skip
    if not product.norm:
        return x
    wide = x.astype(np.float64)
    factor = 1 / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + product.epsilon)
    found: Floats = (wide * factor * product.gamma).astype(np.float32)
    return found


def expected(product: Product, x: Floats) -> tuple[Doubles, Doubles]:
    """The product by its definition, and the sum of the magnitudes that went into it; rows of x are rounded to 8 bits
    in blocks, all else is exact."""
    short = product.blocks * product.block - product.width
    blocks = np.pad(x[0], ((0, 0), (0, short))).reshape(len(x[0]), product.blocks, product.block)
    top = np.abs(blocks).max(axis=-1, keepdims=True)
    factor = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    codes = np.rint(blocks * factor).astype(np.int64)
    weights, scales = product.weights
    padded = np.pad(weights, ((0, 0), (0, short))).reshape(len(weights), product.blocks, product.block)
    sums = np.einsum("rbk,nbk->rnb", codes, padded)
    sizes = np.einsum("rbk,nbk->rnb", np.abs(codes), np.abs(padded))
    scale = top[:, None, :, 0].astype(np.float64) / 127 * scales[None]
    return (sums * scale).sum(axis=-1), (sizes * scale).sum(axis=-1)


def gated(product: Product, y: Doubles) -> Doubles:
    if not product.gate:
        return y
    gate, value = np.split(y, 2, axis=-1)
    inner = gate if product.gate == 1 else 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    with np.errstate(over="ignore"):
        found: Doubles = gate / (1 + np.exp(-inner)) * value
    return found


def check(product: Product, count: int) -> None:
    x, skip = product.rows(count), product.rows(count, 8) if product.skip else None
    y, *total = product.run(x, skip)
    outputs = product.outputs // 2 if product.gate else product.outputs
    assert y.shape == (1, count, outputs) and y.dtype == np.float32
    assert all(np.array_equal(each, x if skip is None else x + skip) for each in total)
    whole, size = expected(product, normed(product, x, skip))
    wanted = gated(product, whole)
    # A norm in another order of additions may round a code the other way: some steps of one code, of 127 a block.
    slack = 4e-6 + (0.02 if product.norm else 0)
    if product.gate:
        gate, value = np.split(np.abs(whole) + slack * size, 2, axis=-1)
        low, high = np.split(size, 2, axis=-1)
        bound = 1.2 * slack * (low * value + high * gate) + 1e-6 * np.abs(wanted)
    else:
        bound = slack * size
    assert (np.abs(y[0] - wanted) <= bound + 1e-30).all()


@pytest.mark.parametrize("row_scales", [False, True], ids=["block scales", "row scales"])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("block", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("bits", [8, 4])
def test_products_are_exact_sums(bits: int, block: int, zeros: bool, row_scales: bool) -> None:
    """Widths that are no whole blocks, nor multiples of 16; outputs that fill no panel; every size of a tile."""
    product = Product(83, 201, block, bits, zeros=zeros, row_scales=row_scales)
    for count in (1, 2, 3, 4, 5, 7, 9):
        check(product, count)


@st.composite
def products(draw: st.DrawFn) -> Product:
    gate = draw(st.integers(0, 2))
    return Product(
        outputs=32 * draw(st.integers(1, 3)) if gate else draw(st.integers(1, 100)),
        width=draw(st.integers(1, 150)),
        block=16 * draw(st.integers(1, 8)),
        bits=draw(st.sampled_from([4, 8])),
        gate=gate,
        zeros=draw(st.booleans()),
        row_scales=draw(st.booleans()),
        norm=draw(st.booleans()),
        skip=draw(st.booleans()),
        total=draw(st.booleans()),
        seed=draw(st.integers(0, 100)),
    )


@settings(max_examples=250, deadline=None)
@given(product=products(), count=st.integers(0, 10))
def test_any_product_with_what_surrounds_it(product: Product, count: int) -> None:
    check(product, count)


@pytest.mark.parametrize("gate", [1, 2], ids=["silu", "gelu"])
def test_gates_are_exact_where_they_are_steep_and_where_they_end(gate: int) -> None:
    """Gate and value are the one activation: what is left is the gate's own error, of which e^-88 is the least."""
    product = Product(32, 16, 16, gate=gate)
    codes, scales, zeros = product._parts
    codes[:], scales[:], zeros[:] = 128, 1, 128
    codes[:, 0] = 129
    x = np.zeros((1, 400, 16), np.float32)
    x[0, :, 0] = np.concatenate([np.linspace(-120, 120, 390), [0, 1e-30, -1e-30, 500, -500, 3e18, -3e18, 9, -9, 1]])
    (y,) = product.run(x)
    wide = x[0, :, :1].astype(np.float64)
    wanted = gated(product, np.repeat(wide, 32, axis=1))
    assert (np.abs(y[0] - wanted) <= 5e-6 * np.abs(wanted) + 1.01 * np.exp(-88.0) * wide**2 + 1e-37).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_codes_do_not_overflow(bits: int) -> None:
    """Pairs in 16 bits and sums in 32: with the lowest and the highest codes and zero points, in the largest block."""
    for zeros in (False, True):
        product = Product(20, 1 << 16, 1 << 16, bits, zeros=zeros, extreme=True)
        codes, _, points = product._parts
        codes[0], codes[1], codes[2] = 0, (1 << bits) - 1, 0
        if zeros:
            points[:3] = [[(1 << bits) - 1], [0], [0]]
        x = np.sign(product.rows(5))
        x[0, 0], x[0, 1] = 1, -1
        (y,) = product.run(x)
        weights, scales = product.weights
        sums = x[0].astype(np.int64) @ weights.T
        assert np.abs(sums).max() == (((1 << bits) - 1) if zeros else 1 << bits - 1) << 16
        wanted = sums * scales[:, 0].astype(np.float64)
        assert np.allclose(y[0], wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("gate", [0, 1])
@pytest.mark.parametrize(("bits", "block"), [(8, 64), (4, 32), (8, 48), (4, 128)])
def test_many_rows_or_one_or_none(bits: int, block: int, gate: int) -> None:
    """Each row alone is bit for bit the row of any call; both are right."""
    product = Product(96, 200, block, bits, gate, norm=True, skip=True, total=True)
    check(product, 300)
    check(product, 0)
    x, skip = product.rows(300), product.rows(300, 8)
    whole = product.run(x, skip)
    for row in range(0, 300, 13):
        for count in (1, 2, 3, 5):
            some = product.run(x[:, row : row + count], skip[:, row : row + count])
            for mine, all_of_them in zip(some, whole, strict=True):
                assert np.array_equal(mine, all_of_them[:, row : row + count])


@settings(max_examples=250, deadline=None)
@given(product=products(), data=st.data())
def test_a_row_does_not_depend_on_the_others(product: Product, data: st.DataObject) -> None:
    """Whatever they hold, and wherever it stands among them."""
    x, skip = product.rows(9), product.rows(9, 8) if product.skip else None
    alone = [product.run(x[:, row : row + 1], None if skip is None else skip[:, row : row + 1]) for row in range(9)]
    order = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=12))
    together = product.run(x[:, order], None if skip is None else skip[:, order])
    for place, row in enumerate(order):
        assert all(np.array_equal(a[:, 0], b[:, place]) for a, b in zip(alone[row], together, strict=True))


@pytest.mark.parametrize("gate", [0, 1])
@pytest.mark.parametrize("bits", [8, 4])
def test_threads_do_not_change_a_bit(bits: int, gate: int) -> None:
    one = Product(1600, 300, 32, bits, gate, norm=True)
    two = replace(one, threads=2)
    for count in (1, 3, 40):  # from little enough for one thread to enough for rows and products in several
        x = one.rows(count)
        assert np.array_equal(one.run(x)[0], two.run(x)[0])
    few = Product(32, 64, threads=2)
    x = few.rows(2)
    assert np.array_equal(few.run(x)[0], replace(few, threads=1).run(x)[0])


def test_sums_need_neither_norm_nor_second_operand() -> None:
    product = Product(16, 40, total=True)
    x = product.rows(3)
    assert np.array_equal(product.run(x)[1], x)


def test_blocks_of_zeros_are_zero() -> None:
    product = Product(24, 96, zeros=True)
    x = product.rows(2)
    x[0, 0] = 0
    x[0, 1, 32:64] = 0
    (y,) = product.run(x)
    assert (y[0, 0] == 0).all() and np.isfinite(y).all() and (y[0, 1] != 0).all()
    for small in (1e-45, 1e-38, 1e-37):  # less than a float's factor can bring to 127
        assert np.abs(product.run(np.full_like(x, small))[0]).max() < 1e-33


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_without_numbers_is_one_and_spoils_no_other(bad: float, norm: bool) -> None:
    """Wherever it holds it: a NaN that became a number would be a token that nobody meant."""
    product = Product(48, 72, norm=norm, zeros=True)
    x = product.rows(6)
    (whole,) = product.run(x)
    for column in (0, 5, 31, 32, 50, 64, 71):
        spoilt = x.copy()
        spoilt[0, 2, column] = bad
        (y,) = product.run(spoilt)
        assert np.isnan(y[0, 2]).all()
        others = [0, 1, 3, 4, 5]
        assert np.array_equal(y[0, others], whole[0, others])


def test_huge_values_stay_numbers() -> None:
    product = Product(16, 64)
    x = product.rows(2)
    x[0, 0] *= np.float32(1e36)
    (y,) = product.run(x)
    wanted, size = expected(product, x)
    assert np.isfinite(y).all() and (np.abs(y[0] - wanted) <= 4e-6 * size).all()
