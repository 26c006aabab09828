// Elements of caches that hold codes: int8, or the 8-bit float e4m3.
#pragma once

#include "problem.cuh"

namespace tree_attention {

// x >= 0 to the e4m3 code nearest to it, ties to even, the largest from 448 on.
TREE_ATTENTION_DEVICE uint32_t e4m3_code(float x) {
    if (x < 0.015625f) return static_cast<uint32_t>(round_even(x * 512.0f));  // subnormal steps of 2^-9
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits += 0x7ffff + (bits >> 20 & 1);
    const uint32_t code = (bits >> 20) - (120 << 3);
    return code > 0x7e ? 0x7e : code;
}

// An e4m3 code's bits are those of a half 2^8 times smaller, subnormals included.
TREE_ATTENTION_DEVICE float code_value(int cache, uint32_t code) {
    if (cache == SPECEXPORT_CACHE_INT8) return static_cast<float>(static_cast<int8_t>(code));
    return fp16_to_float(static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7)) * 256.0f;
}

TREE_ATTENTION_DEVICE uint32_t value_code(int cache, float x) {
    if (cache == SPECEXPORT_CACHE_INT8) return static_cast<uint32_t>(static_cast<int>(round_even(x))) & 0xff;
    return x < 0 ? e4m3_code(-x) | 0x80 : e4m3_code(x);
}

TREE_ATTENTION_DEVICE float largest_code(int cache) { return cache == SPECEXPORT_CACHE_INT8 ? 127.0f : 448.0f; }

template <class Element>
TREE_ATTENTION_DEVICE float element(const Vector& vector, int i) {
    return Element::to_float(static_cast<uint16_t>(vector.word[i / 2] >> (i % 2 * 16)));
}

}  // namespace tree_attention
