// What the kernels share: a call's plan, the tile of cache rows they work on, and which rows are used.
#pragma once

#include "platform.cuh"
#include "tree_attention.h"

namespace tree_attention {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kRowGroup = 16;     // query rows of a warp: the m of the matrix product
constexpr int kColumnGroup = 16;  // cache rows a warp takes at a time: the k of the second product

constexpr float kNothing = -__builtin_huge_valf();  // maximum of no scores

struct Problem : SpecexportTreeAttention {
    int words;       // of a tree row
    int rows;        // query rows of a key-value head, G * T; row = head in group * T + node
    int row_groups;  // warps of a block that take different query rows; the others share out the columns
    int splits;      // shares of the cache
    int processors;  // of the device
    int stages;      // tiles in shared memory
    int chunk;       // 16-byte vectors of a row that one commit block owns
    float* partial;  // [Hkv, rows, splits, D]
    float* summary;  // [Hkv, rows, splits, 2]: maximum (of scores in base 2), sum
};

struct alignas(16) Vector {
    uint32_t word[4];
};
struct alignas(8) Pair {
    float low, high;
};

// A tile of cache rows in shared memory: keys, then values. Rows of 16-bit elements are 16 bytes apart from a multiple
// of 128, which keeps matrix loads free of bank conflicts.
template <int D, bool kCodes>
struct Tile {
    static constexpr int kColumns = D > 128 ? 32 : 64;
    static constexpr int kMaxRowGroups = D > 128 ? (kCodes ? 1 : 2) : 4;  // as fit the 64 KB of sm_75
    static constexpr bool kQueryShared = D > 128;  // the registers are full of accumulators
    static constexpr int kStride = D + 8;
    static constexpr int kElementBytes = 2 * kColumns * kStride * 2;
    static constexpr int kCodeBytes = 2 * kColumns * (D + 4);  // and a scale each
    static constexpr int kStageBytes = kCodes ? kCodeBytes : kElementBytes;
    static constexpr int kQueryBytes = kQueryShared ? kMaxRowGroups * kRowGroup * kStride * 2 : 0;
    static constexpr int shared_bytes(int stages) {
        return stages * kStageBytes + (kCodes ? kElementBytes : 0) + kQueryBytes;
    }
};

// What of the cache is used, in tiles, and how it is shared out. Collective over a warp.
struct Range {
    int past, used;       // cache rows
    int first, tiles;     // tiles that any node sees
    int share, shares;    // tiles of one split, splits that have any
    int farthest;         // largest position of a node, with a window
};

TREE_ATTENTION_ANYWHERE int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }
TREE_ATTENTION_ANYWHERE int ceil_div(int x, int y) { return (x + y - 1) / y; }

TREE_ATTENTION_ANYWHERE int tile_columns(int head_dim) {
    return head_dim > 128 ? Tile<256, false>::kColumns : Tile<128, false>::kColumns;
}
TREE_ATTENTION_ANYWHERE int row_blocks(const Problem& p) { return ceil_div(p.rows, p.row_groups * kRowGroup); }

TREE_ATTENTION_DEVICE Range find_range(const Problem& p, int columns) {
    Range range;
    range.past = clamp(*p.past, 0, p.slots);
    range.used = clamp(range.past + p.nodes, 0, p.slots);
    int nearest = 0x7fffffff;
    range.farthest = -1;
    if (p.window > 0) {
        for (int i = thread_index() & 31; i < p.nodes; i += 32) {
            const int position = p.positions[i];
            nearest = position < nearest ? position : nearest;
            range.farthest = position > range.farthest ? position : range.farthest;
        }
        for (int mask = 16; mask; mask >>= 1) {
            const int low = shuffle_xor(nearest, mask), high = shuffle_xor(range.farthest, mask);
            nearest = low < nearest ? low : nearest;
            range.farthest = high > range.farthest ? high : range.farthest;
        }
    }
    const int low = p.window > 0 ? clamp(clamp(nearest, 0, p.slots) - p.window + 1, 0, range.used - 1) : 0;
    range.first = low / columns;
    range.tiles = ceil_div(range.used, columns) - range.first;
    range.share = ceil_div(range.tiles, p.splits);
    // A partial result costs as much traffic as half a tile and more: two tiles a share if that still fills the device.
    if (range.share == 1 && ceil_div(range.tiles, 2) * row_blocks(p) * p.kv_heads >= p.processors) range.share = 2;
    range.shares = ceil_div(range.tiles, range.share);
    return range;
}

}  // namespace tree_attention
