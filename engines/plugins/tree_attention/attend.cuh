// Flash-decoding (Dao et al., 2023): a block takes up to 64 of the G * T query rows that share a key-value head, so that K
// and V are read once for the whole group, and one share of the *used* cache rows. Products are tensor-core ones
// (m16n8k16) with float32 sums; the softmax is online. Shares are cut on the device from `past`, so a launch is the same
// for every length (CUDA graphs), and blocks without a share leave at once.
#pragma once

#include "codes.cuh"

namespace tree_attention {

// What a lane knows of its two query rows, lane / 4 and lane / 4 + 8 of its warp's sixteen.
struct Lane {
    int index, row_group, column_group, column_groups;
    int row[2], node[2], position[2];
};

TREE_ATTENTION_DEVICE Lane find_lane(const Problem& p) {
    Lane lane;
    lane.index = thread_index() & 31;
    const int warp = thread_index() / 32;
    lane.row_group = warp % p.row_groups;
    lane.column_group = warp / p.row_groups;
    lane.column_groups = kWarps / p.row_groups;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        lane.row[i] = (block_y() * p.row_groups + lane.row_group) * kRowGroup + lane.index / 4 + 8 * i;
        lane.node[i] = lane.row[i] % p.nodes;
        lane.position[i] = p.window > 0 ? p.positions[lane.node[i]] : 0;
    }
    return lane;
}

TREE_ATTENTION_DEVICE bool visible(const Problem& p, const Range& range, int node, int position, int column) {
    if (column < range.past) return p.window <= 0 || position - column < p.window;
    if (column >= range.used) return false;
    const int other = column - range.past;
    if (!(p.tree[size_t(node) * p.words + other / 32] >> (other & 31) & 1)) return false;
    return p.window <= 0 || position - p.positions[other] < p.window;
}

template <int D, bool kCodes>
TREE_ATTENTION_DEVICE void start_tile(const Problem& p, const Range& range, int tile, unsigned char* stage) {
    using Shape = Tile<D, kCodes>;
    constexpr int kVectors = D / (kCodes ? 16 : 8), kPitch = kCodes ? D : Shape::kStride * 2;
    const size_t head = size_t(block_z()) * p.slots;
    static_assert(2 * Shape::kColumns * kVectors % kThreads == 0, "every thread copies as much");
#pragma unroll 4
    for (int step = 0; step < 2 * Shape::kColumns * kVectors / kThreads; ++step) {
        const int i = step * kThreads + thread_index(), line = i / kVectors, vector = i % kVectors;
        const int row = tile * Shape::kColumns + line % Shape::kColumns;
        const bool valid = row < range.used;
        const Vector* cache = static_cast<const Vector*>(line < Shape::kColumns ? p.cache_k : p.cache_v);
        // An invalid row is not read, but its address must be one of the cache's.
        copy_async16(stage + line * kPitch + vector * 16, cache + (head + (valid ? row : 0)) * kVectors + vector, valid);
    }
    if (kCodes) {
        const int row = tile * Shape::kColumns + thread_index() % Shape::kColumns;
        const bool valid = row < range.used;
        if (thread_index() < 2 * Shape::kColumns) {
            const float* scales = thread_index() < Shape::kColumns ? p.scale_k : p.scale_v;
            copy_async4(stage + 2 * Shape::kColumns * D + thread_index() * 4, scales + head + (valid ? row : 0), valid);
        }
    }
    commit_async();
}

// Codes of a tile to elements; both types hold every code exactly.
template <class Element, int D>
TREE_ATTENTION_DEVICE void expand_tile(int cache, const unsigned char* codes, unsigned char* elements) {
    using Shape = Tile<D, true>;
#pragma unroll 4
    for (int step = 0; step < 2 * Shape::kColumns * (D / 8) / kThreads; ++step) {
        const int i = step * kThreads + thread_index(), line = i / (D / 8), part = i % (D / 8);
        const uint32_t* from = reinterpret_cast<const uint32_t*>(codes + line * D + part * 8);
        Vector out;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const uint32_t two = from[w / 2] >> (w % 2 * 16);
            out.word[w] = Element::pack(code_value(cache, two & 0xff), code_value(cache, two >> 8 & 0xff));
        }
        *reinterpret_cast<Vector*>(elements + line * Shape::kStride * 2 + part * 16) = out;
    }
}

template <int D>
struct State {
    float mixed[D / 8][4];  // [channel group][row, row, row + 8, row + 8]
    float maximum[2], sum[2];
};

// Weights times value scales are small for a half: sums over codes are this much larger than they should be. The largest
// product, 65504 / 127 * 64, still fits.
constexpr float kCodeGain = 64.0f;

// The query rows of a warp as left operands: in registers, or for wide heads in shared memory.
template <int D, bool kShared>
struct Query {
    uint32_t fragment[D / 16][4];

    TREE_ATTENTION_DEVICE void load(const Problem& p, const Lane& lane, unsigned char*) {
        const uint32_t* query = static_cast<const uint32_t*>(p.query) + size_t(block_z()) * p.rows * (D / 2);
#pragma unroll
        for (int k = 0; k < D / 16; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = lane.row[i % 2];
                const uint32_t word = k * 8 + i / 2 * 4 + lane.index % 4;
                fragment[k][i] = row < p.rows ? query[size_t(row) * (D / 2) + word] : 0;
            }
    }
    TREE_ATTENTION_DEVICE void get(uint32_t (&out)[4], int k) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = fragment[k][i];
    }
};

template <int D>
struct Query<D, true> {
    const uint16_t* row;

    TREE_ATTENTION_DEVICE void load(const Problem& p, const Lane& lane, unsigned char* shared) {
        constexpr int kStride = D + 8, kVectors = D / 8;
        const Vector* query = static_cast<const Vector*>(p.query) + size_t(block_z()) * p.rows * kVectors;
        const int first = block_y() * p.row_groups * kRowGroup;
        for (int i = thread_index(); i < p.row_groups * kRowGroup * kVectors; i += kThreads) {
            Vector value = {};
            if (first + i / kVectors < p.rows) value = query[size_t(first + i / kVectors) * kVectors + i % kVectors];
            *reinterpret_cast<Vector*>(shared + i / kVectors * kStride * 2 + i % kVectors * 16) = value;
        }
        row = reinterpret_cast<const uint16_t*>(shared) +
              (lane.row_group * kRowGroup + lane.index % 16) * kStride + lane.index / 16 * 8;
    }  // the first tile's barrier makes the rows visible
    TREE_ATTENTION_DEVICE void get(uint32_t (&out)[4], int k) const { load_matrices(out, row + k * 16); }
};

// Sixteen cache rows against a warp's sixteen query rows. `keys` and `values` point at the first of them in the tile,
// `scales` at its key scale; value scales are kColumns further.
template <class Element, int D, bool kCodes>
TREE_ATTENTION_DEVICE void attend_columns(const Problem& p, const Range& range, const Lane& lane,
                                          const Query<D, Tile<D, kCodes>::kQueryShared>& query, const uint16_t* keys,
                                          const uint16_t* values, const float* scales, int column, State<D>& state) {
    constexpr int kStride = Tile<D, kCodes>::kStride;
    const int matrix = lane.index / 8, line = lane.index % 8;
    const uint16_t* key = keys + (matrix / 2 * 8 + line) * kStride + matrix % 2 * 8;
    // Even and odd channel groups add up apart: more products in flight.
    float product[2][2][4] = {};
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        uint32_t left[4], right[4];
        query.get(left, k);
        load_matrices(right, key + k * 16);
        Element::multiply(product[0][k % 2], left, right[0], right[1]);
        Element::multiply(product[1][k % 2], left, right[2], right[3]);
    }
    const bool masked = column + kColumnGroup > range.past || (p.window > 0 && range.farthest - column >= p.window);
    float score[2][4], maximum[2] = {state.maximum[0], state.maximum[1]};
    const int mine = lane.index % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int offset = n * 8 + mine + i % 2;
            float x = (product[n][0][i] + product[n][1][i]) * (p.scale * 1.44269504088896340736f);
            if (kCodes) x *= scales[offset];
            if (masked && !visible(p, range, lane.node[i / 2], lane.position[i / 2], column + offset)) x = kNothing;
            score[n][i] = x;
            maximum[i / 2] = x > maximum[i / 2] ? x : maximum[i / 2];
        }
#pragma unroll
    for (int mask = 1; mask <= 2; mask *= 2)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float other = shuffle_xor(maximum[r], mask);
            maximum[r] = other > maximum[r] ? other : maximum[r];
        }
    if (any_lane(maximum[0] > state.maximum[0] || maximum[1] > state.maximum[1])) {
        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            factor[r] = maximum[r] > state.maximum[r] ? exp2_fast(state.maximum[r] - maximum[r]) : 1.0f;
            state.sum[r] *= factor[r];
            state.maximum[r] = maximum[r];
        }
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) state.mixed[n][i] *= factor[i / 2];
    }
    uint32_t weights[4];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float base = maximum[r] == kNothing ? 0.0f : maximum[r];
            float low = exp2_fast(score[n][2 * r] - base), high = exp2_fast(score[n][2 * r + 1] - base);
            state.sum[r] += low + high;
            if (kCodes) {
                low *= scales[Tile<D, kCodes>::kColumns + n * 8 + mine] * kCodeGain;
                high *= scales[Tile<D, kCodes>::kColumns + n * 8 + mine + 1] * kCodeGain;
            }
            weights[n * 2 + r] = Element::pack(low, high);
        }
    const uint16_t* value = values + (matrix % 2 * 8 + line) * kStride + matrix / 2 * 8;
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
        uint32_t right[4];
        load_matrices_transposed(right, value + n * 16);
        Element::multiply(state.mixed[2 * n], weights, right[0], right[1]);
        Element::multiply(state.mixed[2 * n + 1], weights, right[2], right[3]);
    }
}

// Joins the states of the warps that shared out the columns in the first of them.
template <int D>
TREE_ATTENTION_DEVICE void join_columns(const Lane& lane, State<D>& state, float* shared) {
    float* mine = shared + lane.row_group * (D / 2 + 4) * 32 + lane.index;
    for (int group = 1; group < lane.column_groups; ++group) {
        sync_block();
        if (lane.column_group == group) {
#pragma unroll
            for (int i = 0; i < D / 2; ++i) mine[i * 32] = state.mixed[i / 4][i % 4];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                mine[(D / 2 + r) * 32] = state.maximum[r];
                mine[(D / 2 + 2 + r) * 32] = state.sum[r];
            }
        }
        sync_block();
        if (lane.column_group == 0) {
            float keep[2], add[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float other = mine[(D / 2 + r) * 32], old = state.maximum[r];
                const float top = other > old ? other : old;
                keep[r] = old == top ? 1.0f : exp2_fast(old - top);
                add[r] = other == top ? 1.0f : exp2_fast(other - top);
                state.maximum[r] = top;
                state.sum[r] = state.sum[r] * keep[r] + mine[(D / 2 + 2 + r) * 32] * add[r];
            }
#pragma unroll
            for (int i = 0; i < D / 2; ++i) {
                float& mixed = state.mixed[i / 4][i % 4];
                mixed = mixed * keep[i % 4 / 2] + mine[i * 32] * add[i % 4 / 2];
            }
        }
    }
}

template <class Element, int D>
TREE_ATTENTION_DEVICE void store(const Problem& p, const Lane& lane, const State<D>& state) {
    const int mine = lane.index % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (lane.row[r] >= p.rows) continue;
        const size_t row = size_t(block_z()) * p.rows + lane.row[r];
        if (p.splits == 1) {
            const float inverse = state.sum[r] > 0 ? 1.0f / state.sum[r] : 0.0f;
            uint32_t* out = static_cast<uint32_t*>(p.output) + (row * D + mine) / 2;
#pragma unroll
            for (int n = 0; n < D / 8; ++n)
                out[n * 4] = Element::pack(state.mixed[n][2 * r] * inverse, state.mixed[n][2 * r + 1] * inverse);
        } else {
            const size_t part = row * p.splits + block_x();
            Pair* out = reinterpret_cast<Pair*>(p.partial + part * D + mine);
#pragma unroll
            for (int n = 0; n < D / 8; ++n) out[n * 4] = {state.mixed[n][2 * r], state.mixed[n][2 * r + 1]};
            if (mine == 0) *reinterpret_cast<Pair*>(p.summary + part * 2) = {state.maximum[r], state.sum[r]};
        }
    }
}

// Grid: splits, blocks of query rows, key-value heads.
template <class Element, int D, bool kCodes>
TREE_ATTENTION_KERNEL(kThreads, D > 128 ? 2 : D > 80 ? 3 : 4) attend(Problem p) {
    using Shape = Tile<D, kCodes>;
    TREE_ATTENTION_SHARED(shared);
    const Range range = find_range(p, Shape::kColumns);
    if (block_x() >= range.shares) return;
    const int begin = range.first + block_x() * range.share, limit = range.first + range.tiles;
    const int end = begin + range.share < limit ? begin + range.share : limit;
    const Lane lane = find_lane(p);
    unsigned char* elements = shared + (kCodes ? p.stages * Shape::kStageBytes : 0);
    start_tile<D, kCodes>(p, range, begin, shared);
    Query<D, Shape::kQueryShared> query;
    query.load(p, lane, shared + p.stages * Shape::kStageBytes + (kCodes ? Shape::kElementBytes : 0));
    State<D> state = {{}, {kNothing, kNothing}, {0, 0}};

    for (int tile = begin; tile < end; ++tile) {
        unsigned char* stage = shared + (p.stages == 2 ? (tile - begin) % 2 : 0) * Shape::kStageBytes;
        if (p.stages == 2 && tile + 1 < end) {
            start_tile<D, kCodes>(p, range, tile + 1, shared + (tile + 1 - begin) % 2 * Shape::kStageBytes);
            wait_async<1>();
        } else {
            wait_async<0>();
        }
        sync_block();
        if (kCodes) {
            expand_tile<Element, D>(p.cache, stage, elements);
            sync_block();
        }
        const uint16_t* keys = reinterpret_cast<const uint16_t*>(kCodes ? elements : stage);
        const float* scales = reinterpret_cast<const float*>(stage + 2 * Shape::kColumns * D);
        const int left = range.used - tile * Shape::kColumns;
        for (int offset = lane.column_group * kColumnGroup; offset < Shape::kColumns && offset < left;
             offset += lane.column_groups * kColumnGroup) {
            const uint16_t* key = keys + offset * Shape::kStride;
            attend_columns<Element, D, kCodes>(p, range, lane, query, key, key + Shape::kColumns * Shape::kStride,
                                               scales + offset, tile * Shape::kColumns + offset, state);
        }
        sync_block();
        if (p.stages == 1 && tile + 1 < end) start_tile<D, kCodes>(p, range, tile + 1, shared);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        state.sum[r] += shuffle_xor(state.sum[r], 1);
        state.sum[r] += shuffle_xor(state.sum[r], 2);
        if (kCodes) state.sum[r] *= kCodeGain;
    }
    join_columns<D>(lane, state, reinterpret_cast<float*>(shared));
    if (lane.column_group == 0) store<Element, D>(p, lane, state);
}

}  // namespace tree_attention
