"""Keyed Gumbel noise: ``G(seed, position, token)`` is a pure function, so sampling has no state and no order.

``argmax over x of log p(x) + G(seed, position, x)`` draws from p (the Gumbel-max trick; Gumbel 1954, Maddison et al.
2014). The noise of a token depends on nothing but its key, so the token at a position is the same however many
tokens a step verifies, and every port can be checked token by token.

Exact definition (all arithmetic on unsigned 64-bit integers, modulo 2**64)::

    GOLDEN = 0x9E3779B97F4A7C15
    mix(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9
             z ^= z >> 27;  z *= 0x94D049BB133111EB
             z ^= z >> 31
    a = mix(seed + GOLDEN)
    b = mix(a + (position + 1) * GOLDEN)           # the key of one position
    c = mix(b + (token + 1) * GOLDEN)
    k = c >> 12                                    # 52 bits
    u = (k + 0.5) * 2**-52                         # exact in a double, never 0 or 1
    G = -log(-log(u))                              # double, natural logarithm

Acceptance rules that need a uniform number beside the noise take ``u`` of the counters from 2**32 on (:func:`uniform`).
No token id reaches them, so such a number never is the one behind a token's noise.

``mix`` is the SplitMix64 finaliser (Steele, Lea and Flood 2014, with Stafford's "Mix13" constants): each level is a
SplitMix64 stream whose state is the level above. G lies in ``[G_MIN, G_MAX]`` (about -3.604 and 36.737); integers
are equal on every platform, G up to the last bits of its ``log``.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

UIntArray = NDArray[np.uint64]
Float64Array = NDArray[np.float64]

GOLDEN = 0x9E3779B97F4A7C15
_MUL_1, _MUL_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1
_BITS = 52
#: First counter of the uniforms, above every token id.
_UNIFORMS = 1 << 32

#: Bounds of G: the noise of k = 0 and of k = 2**52 - 1.
G_MIN = -math.log(-math.log(2.0**-53))
G_MAX = -math.log(-math.log(1.0 - 2.0**-53))


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MUL_1) & _WORD
    z = ((z ^ (z >> 27)) * _MUL_2) & _WORD
    return z ^ (z >> 31)


def position_key(seed: int, position: int) -> int:
    """The 64-bit key ``b`` of one position. ``seed`` and ``position`` are taken modulo 2**64."""
    a = _mix((seed + GOLDEN) & _WORD)
    return _mix((a + (position + 1) * GOLDEN) & _WORD)


def token_strides(tokens: NDArray[np.int64]) -> UIntArray:
    """uint64 [n]: ``(token + 1) * GOLDEN``, the part of the hash that no key changes."""
    return (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)


def hash_strides(
    key: int, strides: UIntArray, out: UIntArray | None = None, scratch: UIntArray | None = None
) -> UIntArray:
    """uint64 [n]: the 52 bits ``k`` of each token.

    Args:
        key: from :func:`position_key`. strides: uint64 [n] from :func:`token_strides`.
        out, scratch: uint64 [n] buffers to work in; fresh ones if absent.
    """
    z = np.add(strides, np.uint64(key), out=out)
    shifted = np.empty_like(z) if scratch is None else scratch
    for shift, multiplier in ((30, _MUL_1), (27, _MUL_2)):
        np.right_shift(z, np.uint64(shift), out=shifted)
        np.bitwise_xor(z, shifted, out=z)
        np.multiply(z, np.uint64(multiplier), out=z)
    np.right_shift(z, np.uint64(31), out=shifted)
    np.bitwise_xor(z, shifted, out=z)
    return np.right_shift(z, np.uint64(64 - _BITS), out=z)


def noise_of_bits(bits: UIntArray) -> Float64Array:
    """float64 [n]: G of the 52-bit integers ``k``."""
    noise: Float64Array = bits.astype(np.float64)
    noise += 0.5
    noise *= 2.0**-_BITS
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)


def bits_reaching(noise: float) -> int:
    """A ``k`` such that no smaller one gives G >= ``noise``: a safe bound, a few steps below the exact one."""
    if noise <= G_MIN:
        return 0
    # -expm1(-y) keeps 1 - u exact where u is nearly 1; the slack covers the rounding of exp and log elsewhere.
    shortfall = -math.expm1(-math.exp(-noise))
    return max(0, (1 << _BITS) - math.ceil(shortfall * (1.0 + 1e-9) * 2.0**_BITS) - 4)


def gumbel_bits(seed: int, position: int, tokens: NDArray[np.int64]) -> UIntArray:
    """uint64 [n]: the 52-bit integers ``k`` of ``tokens`` (int64 [n]) at one position."""
    return hash_strides(position_key(seed, position), token_strides(tokens))


def gumbel(seed: int, position: int, tokens: NDArray[np.int64]) -> Float64Array:
    """float64 [n]: ``G(seed, position, token)`` of ``tokens`` (int64 [n]) at one absolute position."""
    return noise_of_bits(gumbel_bits(seed, position, tokens))


def uniform(key: int, number: int) -> float:
    """``u``, above 0 and below 1: the ``number``-th (from 0) uniform of a position's ``key``, apart from all noise."""
    return ((_mix((key + (_UNIFORMS + number + 1) * GOLDEN) & _WORD) >> (64 - _BITS)) + 0.5) * 2.0**-_BITS
