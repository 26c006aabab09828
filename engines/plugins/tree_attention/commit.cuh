// Moves accepted rows and appends the new ones. A block owns some channels of one head, in the keys or the values, so
// blocks share nothing; it stages rows in shared memory before it overwrites any.
#pragma once

#include "codes.cuh"

namespace tree_attention {

// 16 codes of a new row and the row's scale.
template <class Element>
TREE_ATTENTION_DEVICE Vector quantize(const Problem& p, const Vector* row, int vector, float* scale) {
    float largest = 0;
    for (int v = 0; v < p.head_dim / 8; ++v) {
        const Vector part = row[v];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float x = element<Element>(part, i), size = x < 0 ? -x : x;
            largest = size > largest ? size : largest;
        }
    }
    const float limit = largest_code(p.cache), inverse = largest > 0 ? limit / largest : 0;
    *scale = largest / limit;
    Vector out;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const Vector part = row[vector * 2 + w / 2];
        out.word[w] = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float x = element<Element>(part, w % 2 * 4 + i) * inverse;
            out.word[w] |= value_code(p.cache, x < -limit ? -limit : x > limit ? limit : x) << (8 * i);
        }
    }
    return out;
}

// Grid: chunks of channels, heads, {keys, values}.
template <class Element, bool kCodes>
TREE_ATTENTION_KERNEL(kThreads, 4) commit(Problem p) {
    TREE_ATTENTION_SHARED(shared);
    const bool keys = block_z() == 0;
    const int head = block_y(), row_vectors = p.head_dim / (kCodes ? 16 : 8), new_vectors = p.head_dim / 8;
    const int first = block_x() * p.chunk;
    const int vectors = row_vectors - first < p.chunk ? row_vectors - first : p.chunk;
    Vector* cache = static_cast<Vector*>(keys ? p.cache_k : p.cache_v) + size_t(head) * p.slots * row_vectors + first;
    float* scales = kCodes ? (keys ? p.scale_k : p.scale_v) + size_t(head) * p.slots : nullptr;
    const Vector* rows = static_cast<const Vector*>(keys ? p.key : p.value) + size_t(head) * p.nodes * new_vectors;
    Vector* staged = reinterpret_cast<Vector*>(shared);
    float* staged_scales = reinterpret_cast<float*>(staged + p.committed * vectors);

    for (int i = thread_index(); i < p.committed * vectors; i += thread_count()) {
        const int row = clamp(p.commit[i / vectors], 0, p.slots - 1);
        staged[i] = cache[size_t(row) * row_vectors + i % vectors];
        if (kCodes && i % vectors == 0) staged_scales[i / vectors] = scales[row];
    }
    sync_block();
    const long long write = *p.write;
    for (int i = thread_index(); i < (p.committed + p.nodes) * vectors; i += thread_count()) {
        const int source = p.order[i / vectors], vector = i % vectors;
        const long long row = write + i / vectors;
        if (row < 0 || row >= p.slots || source < 0 || source >= p.committed + p.nodes) continue;
        Vector* to = cache + row * row_vectors + vector;
        float scale = 0;
        if (source < p.committed) {
            *to = staged[source * vectors + vector];
            if (kCodes) scale = staged_scales[source];
        } else {
            const Vector* from = rows + size_t(source - p.committed) * new_vectors;
            if (kCodes)
                *to = quantize<Element>(p, from, first + vector, &scale);
            else
                *to = from[first + vector];
        }
        if (kCodes && first + vector == 0) scales[row] = scale;
    }
}

}  // namespace tree_attention
