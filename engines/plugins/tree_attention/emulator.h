// The operations of platform.cuh for a host compiler: the threads of a block are fibers, run one block after another.
//
// A fiber runs until a barrier or a warp-wide operation, then the next one continues. The last lane to arrive at a
// warp-wide operation carries it out for all 32, from pointers into the stacks of the waiting ones. Asynchronous copies
// happen when they are waited for, shared memory starts as NaNs, and the order of warps and lanes can be turned round:
// a missing barrier or wait gives wrong numbers, and diverging lanes end the process with a message.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "fibers.h"

#define TREE_ATTENTION_KERNEL(threads, blocks) void
#define TREE_ATTENTION_DEVICE inline
#define TREE_ATTENTION_ANYWHERE inline
#define TREE_ATTENTION_SHARED(name) unsigned char* name = ::tree_attention::emulator::machine().shared

namespace tree_attention {
namespace emulator {

inline void float_to_pairs(float* out, uint32_t word, bool bf16) {
    if (bf16) {
        const uint32_t low = word << 16, high = word & 0xffff0000u;
        std::memcpy(out, &low, 4);
        std::memcpy(out + 1, &high, 4);
    } else {
        out[0] = machine().fp16[word & 0xffff];
        out[1] = machine().fp16[word >> 16];
    }
}

// The warp's c += a b from the registers of its lanes (PTX: mma.m16n8k16, matrix fragments).
inline void multiply_warp(Fiber* lanes, bool bf16) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < kLanes; ++lane) {
        const int row = lane / 4, column = lane % 4 * 2;
        const auto* x = static_cast<const uint32_t*>(lanes[lane].first);
        const auto* y = static_cast<const uint32_t*>(lanes[lane].second);
        for (int i = 0; i < 4; ++i) float_to_pairs(&a[row + i % 2 * 8][column + i / 2 * 8], x[i], bf16);
        for (int i = 0; i < 2; ++i) {
            float pair[2];
            float_to_pairs(pair, y[i], bf16);
            b[column + i * 8][row] = pair[0];
            b[column + i * 8 + 1][row] = pair[1];
        }
    }
    for (int row = 0; row < 16; ++row) {
        float sum[8] = {};
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 8; ++n) sum[n] += a[row][k] * b[k][n];
        for (int n = 0; n < 8; ++n)
            static_cast<float*>(lanes[row % 8 * 4 + n / 2].result)[row / 8 * 2 + n % 2] += sum[n];
    }
}

inline void load_warp(Fiber* lanes, bool transposed) {
    for (int lane = 0; lane < kLanes; ++lane) {
        auto* out = static_cast<uint32_t*>(lanes[lane].result);
        for (int i = 0; i < 4; ++i) {
            const int row = transposed ? lane % 4 * 2 : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2;
            const auto* low = static_cast<const uint16_t*>(lanes[i * 8 + row].first);
            const auto* high = static_cast<const uint16_t*>(lanes[i * 8 + row + transposed].first);
            out[i] = low[column] | uint32_t(high[column + !transposed]) << 16;
        }
    }
}

inline void carry_out(Operation operation, Fiber* lanes) {
    switch (operation) {
        case Operation::kShuffle:
            for (int lane = 0; lane < kLanes; ++lane)
                std::memcpy(lanes[lane].result, lanes[(lane ^ lanes[lane].number) & 31].first, 4);
            break;
        case Operation::kVote: {
            bool any = false;
            for (int lane = 0; lane < kLanes; ++lane) any |= lanes[lane].number != 0;
            for (int lane = 0; lane < kLanes; ++lane) *static_cast<bool*>(lanes[lane].result) = any;
            break;
        }
        case Operation::kMatrices:
        case Operation::kMatricesTransposed:
            load_warp(lanes, operation == Operation::kMatricesTransposed);
            break;
        case Operation::kMultiply:
            multiply_warp(lanes, lanes[0].number != 0);
            break;
        case Operation::kNone:
            break;
    }
}

inline void collective(Operation operation, const void* first, const void* second, void* result, int number) {
    Machine& m = machine();
    const int index = m.current / kLanes;
    Warp& warp = m.warps[index];
    Fiber& mine = m.fibers[m.current];
    if (warp.arrived && warp.operation != operation) fail("the lanes of a warp are at different operations");
    warp.operation = operation;
    mine.first = first, mine.second = second, mine.result = result, mine.number = number;
    if (++warp.arrived == kLanes) {
        warp.arrived = 0;
        carry_out(operation, &m.fibers[index * kLanes]);
        ++warp.generation;
        return;
    }
    const unsigned generation = warp.generation;
    while (warp.generation == generation) {
        const int next = next_in_warp(index, m.current % kLanes);
        if (next == m.current) fail("the other lanes of a warp are at a barrier or gone");
        switch_to(next);
    }
}

inline void run_copies(std::size_t pending) {
    Fiber& mine = machine().fibers[machine().current];
    if (mine.group_ends.size() <= pending) return;
    const std::size_t groups = mine.group_ends.size() - pending, count = mine.group_ends[groups - 1];
    for (std::size_t i = 0; i < count; ++i) {
        const Copy& copy = mine.copies[i];
        if (copy.valid)
            std::memcpy(copy.to, copy.from, copy.bytes), machine().copied += copy.bytes;
        else
            std::memset(copy.to, 0, copy.bytes);
    }
    mine.copies.erase(mine.copies.begin(), mine.copies.begin() + count);
    mine.group_ends.erase(mine.group_ends.begin(), mine.group_ends.begin() + groups);
    for (std::size_t& end : mine.group_ends) end -= count;
}

}  // namespace emulator

inline int thread_index() { return emulator::machine().current; }
inline int thread_count() { return emulator::machine().threads; }
inline int block_x() { return emulator::machine().x; }
inline int block_y() { return emulator::machine().y; }
inline int block_z() { return emulator::machine().z; }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float round_even(float x) { return std::nearbyint(x); }

inline void sync_block() {
    emulator::Machine& m = emulator::machine();
    if (++m.at_barrier == m.alive) {
        m.at_barrier = 0;
        for (int i = 0; i < m.threads; ++i) m.fibers[i].at_barrier = false;
        return;
    }
    if (m.alive != m.threads) emulator::fail("a barrier after some threads left");
    emulator::Fiber& mine = m.fibers[m.current];
    mine.at_barrier = true;
    while (mine.at_barrier) emulator::switch_to(emulator::next_anywhere());
}

template <class Number>
Number shuffle_xor(Number x, int mask) {
    static_assert(sizeof(Number) == 4, "shuffles move 32 bits");
    Number out;
    emulator::collective(emulator::Operation::kShuffle, &x, nullptr, &out, mask);
    return out;
}

inline bool any_lane(bool x) {
    bool out;
    emulator::collective(emulator::Operation::kVote, nullptr, nullptr, &out, x);
    return out;
}

inline void copy_async(void* to, const void* from, bool valid, int bytes) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % bytes)
        emulator::fail("an asynchronous copy is not aligned");
    emulator::machine().fibers[emulator::machine().current].copies.push_back({to, from, bytes, valid});
}
inline void copy_async16(void* to, const void* from, bool valid) { copy_async(to, from, valid, 16); }
inline void copy_async4(void* to, const void* from, bool valid) { copy_async(to, from, valid, 4); }
inline void commit_async() {
    emulator::Fiber& mine = emulator::machine().fibers[emulator::machine().current];
    mine.group_ends.push_back(mine.copies.size());
}
template <int pending>
void wait_async() {
    emulator::run_copies(pending);
}

inline void load_matrices(uint32_t (&out)[4], const void* row) {
    emulator::collective(emulator::Operation::kMatrices, row, nullptr, out, 0);
}
inline void load_matrices_transposed(uint32_t (&out)[4], const void* row) {
    emulator::collective(emulator::Operation::kMatricesTransposed, row, nullptr, out, 0);
}

inline float fp16_to_float(uint16_t bits) { return emulator::machine().fp16[bits]; }

struct Fp16 {
    static float to_float(uint16_t bits) { return fp16_to_float(bits); }
    static uint32_t round(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        const uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
        if (rest > 0x7f800000) return sign | 0x7e00;
        if (rest >= 0x477ff000) return sign | 0x7c00;
        if (rest < 0x38800000) return sign | uint32_t(std::nearbyint(std::ldexp(std::fabs(x), 24)));
        return sign | (((rest + 0xfff + (rest >> 13 & 1)) >> 13) - (112 << 10));
    }
    static uint32_t pack(float low, float high) { return round(low) | round(high) << 16; }
    static void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        const uint32_t b[2] = {b0, b1};
        emulator::collective(emulator::Operation::kMultiply, a, b, c, 0);
    }
};

struct Bf16 {
    static float to_float(uint16_t bits) {
        const uint32_t wide = uint32_t(bits) << 16;
        float x;
        std::memcpy(&x, &wide, 4);
        return x;
    }
    static uint32_t round(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
    static uint32_t pack(float low, float high) { return round(low) | round(high) << 16; }
    static void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        const uint32_t b[2] = {b0, b1};
        emulator::collective(emulator::Operation::kMultiply, a, b, c, 1);
    }
};

struct Device {
    int processors, shared_bytes;
    bool bf16;
};

inline int find_device(Device& device) {
    device = {emulator::machine().processors, emulator::machine().shared_bytes, true};
    return 0;
}

template <class Problem>
int launch(void (*kernel)(Problem), const Problem& problem, int x, int y, int z, int threads, int shared, void*) {
    emulator::Machine& m = emulator::machine();
    if (threads % emulator::kLanes || threads > emulator::kMaxThreads || shared > m.shared_bytes)
        emulator::fail("a launch that no device would take");
    m.threads = threads;
    m.body = [kernel, &problem] { kernel(problem); };
    for (int i = 0; i < x * y * z; ++i) {
        const int block = m.reversed ? x * y * z - 1 - i : i;
        m.x = block % x, m.y = block / x % y, m.z = block / x / y;
        emulator::run_block();
    }
    return 0;
}

}  // namespace tree_attention

// The device that the emulator stands for: multiprocessors, shared memory of a block, and whether blocks, warps and
// lanes run in the opposite order.
extern "C" inline __attribute__((used)) void tree_attention_emulate(int processors, int shared_bytes, int reversed) {
    auto& m = tree_attention::emulator::machine();
    m.processors = processors, m.shared_bytes = shared_bytes, m.reversed = reversed != 0;
}

// Bytes of the caches that attention has read since the last time it was asked.
extern "C" inline __attribute__((used)) std::size_t tree_attention_emulated_reads() {
    return std::exchange(tree_attention::emulator::machine().copied, 0);
}
