"""The keyed noise: committed vectors, an independent scalar port, and statistics that a bad hash fails."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from specexport.runtime import gumbel

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "gumbel_vectors.json").read_text())
EULER = 0.5772156649015329
MASK = 2**64 - 1


def scalar_bits(seed: int, position: int, token: int) -> int:
    """The definition in the docstring, once more, in Python integers."""

    def mix(z: int) -> int:
        z ^= z >> 30
        z = z * 0xBF58476D1CE4E5B9 & MASK
        z ^= z >> 27
        z = z * 0x94D049BB133111EB & MASK
        return z ^ z >> 31

    golden = 0x9E3779B97F4A7C15
    a = mix(seed + golden & MASK)
    b = mix(a + (position + 1) * golden & MASK)
    return mix(b + (token + 1) * golden & MASK) >> 12


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda v: f"{v['seed']}-{v['position']}-{v['token']}")
def test_vectors(vector: dict[str, str | int | float]) -> None:
    seed, position, token = int(vector["seed"]), int(vector["position"]), int(vector["token"])
    bits = gumbel.gumbel_bits(seed, position, np.array([token]))
    assert int(bits[0]) == int(vector["bits"]) == scalar_bits(seed, position, token)
    assert gumbel.gumbel(seed, position, np.array([token]))[0] == pytest.approx(vector["gumbel"], rel=1e-12, abs=1e-12)


def test_uniforms_are_counters_above_every_token() -> None:
    for seed, position, number in ((0, 0, 0), (7, 3, 1), (2**64 - 1, 10**9, 2**31)):
        value = gumbel.uniform(gumbel.position_key(seed, position), number)
        assert value == (scalar_bits(seed, position, 2**32 + number) + 0.5) * 2.0**-52
        assert 0 < value < 1


def test_uniforms_are_uniform_and_apart_from_the_noise() -> None:
    key = gumbel.position_key(5, 6)
    values = np.array([gumbel.uniform(key, number) for number in range(20_000)])
    counts = np.bincount((values * 50).astype(int), minlength=50)
    assert ((counts - 400) ** 2 / 400).sum() < 49 + 5 * 98**0.5
    own = gumbel.gumbel(5, 6, np.arange(20_000))
    assert abs(np.corrcoef(values, own)[0, 1]) < 5 / 20_000**0.5
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 5 / 20_000**0.5


def test_noise_against_the_definition() -> None:
    bits = np.array([0, 1, 12345, 2**51, 2**52 - 2, 2**52 - 1], np.uint64)
    expected = [-math.log(-math.log((int(k) + 0.5) * 2.0**-52)) for k in bits]
    np.testing.assert_allclose(gumbel.noise_of_bits(bits), expected, rtol=1e-12, atol=1e-12)
    assert gumbel.G_MIN == pytest.approx(expected[0]) == pytest.approx(-3.6037789929704576)
    assert gumbel.G_MAX == pytest.approx(expected[-1]) == pytest.approx(36.7368005696771)


def test_buffers_do_not_change_the_hash() -> None:
    tokens = np.arange(1000, dtype=np.int64)
    out, scratch = np.ones(1000, np.uint64), np.ones(1000, np.uint64)
    key = gumbel.position_key(7, 9)
    result = gumbel.hash_strides(key, gumbel.token_strides(tokens), out, scratch)
    assert result is out
    np.testing.assert_array_equal(out, gumbel.gumbel_bits(7, 9, tokens))


def test_bits_reaching_never_skips() -> None:
    rng = np.random.default_rng(1)
    noise = np.concatenate([rng.uniform(gumbel.G_MIN, gumbel.G_MAX, 3000), [gumbel.G_MIN, gumbel.G_MAX, -5.0]])
    for value in noise:
        k = gumbel.bits_reaching(float(value))
        assert 0 <= k < 2**52
        if k:
            assert gumbel.noise_of_bits(np.array([k - 1], np.uint64))[0] < value
        # Useful, too: it keeps few more than it must.
        allowed = min(k + max(16, int((2**52 - k) * 1e-6)), 2**52 - 1)
        assert gumbel.noise_of_bits(np.array([allowed], np.uint64))[0] >= value - 1e-6 or value > gumbel.G_MAX - 1


AXES = {
    "tokens": lambda n: gumbel.gumbel(3, 17, np.arange(n)),
    "positions": lambda n: np.array([gumbel.gumbel(3, p, np.array([42]))[0] for p in range(n)]),
    "seeds": lambda n: np.array([gumbel.gumbel(s, 17, np.array([42]))[0] for s in range(n)]),
}


@pytest.mark.parametrize("axis", AXES)
def test_distribution(axis: str) -> None:
    size = 200_000 if axis == "tokens" else 20_000
    noise = AXES[axis](size)
    deviation = math.pi / math.sqrt(6)
    assert abs(noise.mean() - EULER) < 4 * deviation / math.sqrt(size)
    # Var of the sample variance of a Gumbel: (kurtosis - 1) sigma^4 / n with kurtosis 5.4.
    assert abs(noise.var() - deviation**2) < 4 * deviation**2 * math.sqrt(4.4 / size)
    cdf = np.exp(-np.exp(-np.sort(noise)))
    ranks = np.arange(1, size + 1) / size
    distance = max(float(np.abs(cdf - ranks).max()), float(np.abs(cdf - (ranks - 1 / size)).max()))
    assert distance < 1.95 / math.sqrt(size)  # Kolmogorov-Smirnov, p = 0.001


def uniform(noise: np.ndarray) -> np.ndarray:
    return np.exp(-np.exp(-noise))


@pytest.mark.parametrize("lag", [1, 2, 3, 256, 1024])
@pytest.mark.parametrize("axis", AXES)
def test_neighbours_are_independent(axis: str, lag: int) -> None:
    """Serial chi-square on an 8x8 grid and correlation, between keys that differ by a small or round step."""
    size = 100_000 if axis == "tokens" else 16_000
    u = uniform(AXES[axis](size + lag))
    first, second = u[:-lag], u[lag:]
    count = len(first)
    assert abs(np.corrcoef(first, second)[0, 1]) < 4.5 / math.sqrt(count)
    cells = np.bincount((first * 8).astype(int) * 8 + (second * 8).astype(int), minlength=64)
    chi_square = float(((cells - count / 64) ** 2 / (count / 64)).sum())
    assert 63 - 4.5 * math.sqrt(126) < chi_square < 63 + 4.5 * math.sqrt(126)


def test_rows_of_neighbouring_keys_are_independent() -> None:
    tokens = np.arange(50_000)
    base = uniform(gumbel.gumbel(5, 100, tokens))
    for other in (gumbel.gumbel(5, 101, tokens), gumbel.gumbel(6, 100, tokens), gumbel.gumbel(6, 99, tokens)):
        assert abs(np.corrcoef(base, uniform(other))[0, 1]) < 4.5 / math.sqrt(len(tokens))
    assert abs(np.corrcoef(base[1:], uniform(gumbel.gumbel(5, 101, tokens))[:-1])[0, 1]) < 4.5 / math.sqrt(len(tokens))


def test_every_input_bit_flips_half_of_the_output() -> None:
    for flip in range(0, 63):
        for change in ((1 << flip, 0, 0), (0, 1 << flip, 0), (0, 0, 1 << min(flip, 40))):
            flips = [
                (
                    scalar_bits(s, p, t)
                    ^ int(gumbel.gumbel_bits(s ^ change[0], p ^ change[1], np.array([t ^ change[2]]))[0])
                )
                for s, p, t in ((1, 5, 9), (77, 300, 40_000), (2**40, 12, 3), (0, 0, 0), (9, 9, 9), (5, 1000, 128_000))
            ]
            mean = sum(bits.bit_count() for bits in flips) / len(flips)
            assert 26 - 9 < mean < 26 + 9, (flip, change)
