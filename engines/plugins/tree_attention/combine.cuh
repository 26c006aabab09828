// Joins the shares' partial results: (maximum, sum, accumulator) of each query row.
#pragma once

#include "problem.cuh"

namespace tree_attention {

// A warp a query row. Grid: rows / warps, key-value heads.
template <class Element>
TREE_ATTENTION_KERNEL(kThreads, 4) combine(Problem p) {
    const Range range = find_range(p, tile_columns(p.head_dim));
    const int in_head = block_x() * kWarps + thread_index() / 32, lane = thread_index() & 31;
    if (in_head >= p.rows) return;
    const size_t row = size_t(block_y()) * p.rows + in_head;
    const float* summary = p.summary + row * p.splits * 2;
    const float* partial = p.partial + row * p.splits * p.head_dim;
    float maximum = kNothing;
    for (int s = 0; s < range.shares; ++s) maximum = summary[2 * s] > maximum ? summary[2 * s] : maximum;
    const float base = maximum == kNothing ? 0.0f : maximum;
    for (int channel = 2 * lane; channel < p.head_dim; channel += 64) {
        float sum = 0, low = 0, high = 0;
        for (int s = 0; s < range.shares; ++s) {
            const float factor = exp2_fast(summary[2 * s] - base);
            const Pair part = *reinterpret_cast<const Pair*>(partial + size_t(s) * p.head_dim + channel);
            sum += summary[2 * s + 1] * factor;
            low += part.low * factor;
            high += part.high * factor;
        }
        const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
        static_cast<uint32_t*>(p.output)[(row * p.head_dim + channel) / 2] =
            Element::pack(low * inverse, high * inverse);
    }
}

}  // namespace tree_attention
