// Threads of a block as fibers: each runs until it has to wait, then another goes on.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

namespace tree_attention {
namespace emulator {

constexpr int kLanes = 32, kMaxThreads = 256, kSharedBytes = 256 * 1024;
constexpr std::size_t kStackBytes = 128 * 1024;

enum class Operation { kNone, kShuffle, kVote, kMatrices, kMatricesTransposed, kMultiply };

struct Copy {
    void* to;
    const void* from;
    int bytes;
    bool valid;
};

struct Fiber {
    ucontext_t context;
    jmp_buf jump;
    bool started = false, done = false, at_barrier = false;
    // What a waiting lane brought to the warp-wide operation: inputs and where the result goes.
    const void* first = nullptr;
    const void* second = nullptr;
    void* result = nullptr;
    int number = 0;
    std::vector<Copy> copies;
    std::vector<std::size_t> group_ends;
    std::unique_ptr<char[]> stack;
};

struct Warp {
    int arrived = 0;
    unsigned generation = 0;
    Operation operation = Operation::kNone;
};

struct Machine {
    Fiber fibers[kMaxThreads];
    Warp warps[kMaxThreads / kLanes];
    alignas(128) unsigned char shared[kSharedBytes];
    jmp_buf main;
    int current = 0, threads = 0, alive = 0, at_barrier = 0;
    int x = 0, y = 0, z = 0;
    bool reversed = false;
    std::function<void()> body;
    std::size_t copied = 0;  // bytes that asynchronous copies read
    // The device that launches are planned for.
    int processors = 4, shared_bytes = 99 * 1024;
    float fp16[65536];

    Machine() {
        for (uint32_t bits = 0; bits < 65536; ++bits) {
            const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
            float value = exponent == 0    ? std::ldexp(float(mantissa), -24)
                          : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                           : std::ldexp(float(mantissa | 1024), exponent - 25);
            fp16[bits] = bits & 0x8000 ? -value : value;
        }
    }
};

inline Machine& machine() {
    static Machine one;
    return one;
}

[[noreturn]] inline void fail(const char* reason) {
    std::fprintf(stderr, "tree_attention emulator: %s\n", reason);
    std::abort();
}

void run_fiber();

inline void prepare(Fiber& fiber) {
    if (fiber.stack) return;
    fiber.stack.reset(new char[kStackBytes]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
}

// setcontext only the first time: it is a system call, the jumps are not.
[[noreturn]] inline void resume(Fiber& fiber) {
    if (fiber.started) _longjmp(fiber.jump, 1);
    fiber.started = true;
    setcontext(&fiber.context);
    fail("setcontext failed");
}

__attribute__((noinline)) inline void switch_to(int next) {
    Machine& m = machine();
    const int from = m.current;
    if (next == from) return;
    m.current = next;
    if (_setjmp(m.fibers[from].jump) == 0) resume(m.fibers[next]);
}

// A lane of this warp that can go on, after the current one in the chosen order; -1 if there is none.
inline int next_in_warp(int warp, int lane) {
    Machine& m = machine();
    for (int step = 1; step <= kLanes; ++step) {
        const int other = warp * kLanes + ((m.reversed ? lane - step : lane + step) & (kLanes - 1));
        if (!m.fibers[other].done && !m.fibers[other].at_barrier) return other;
    }
    return -1;
}

inline int next_anywhere() {
    Machine& m = machine();
    const int warps = m.threads / kLanes, warp = m.current / kLanes;
    for (int step = 0; step < warps; ++step) {
        const int other = m.reversed ? (warp - step + warps) % warps : (warp + step) % warps;
        const int found = next_in_warp(other, m.current % kLanes);
        if (found >= 0) return found;
    }
    fail("no thread can go on: a barrier that not every thread reaches");
}

inline void run_fiber() {
    Machine& m = machine();
    for (;;) {
        m.body();
        Fiber& mine = m.fibers[m.current];
        mine.done = true;
        if (!mine.copies.empty() && mine.group_ends.empty()) fail("copies were started and never committed");
        mine.copies.clear();
        mine.group_ends.clear();
        if (m.warps[m.current / kLanes].arrived) fail("a lane left while others of its warp wait for it");
        if (--m.alive == 0) {
            if (_setjmp(mine.jump) == 0) _longjmp(m.main, 1);
        } else {
            if (m.at_barrier == m.alive) fail("a thread left while the others wait at a barrier");
            switch_to(next_anywhere());
        }
    }
}

inline void run_block() {
    Machine& m = machine();
    m.alive = m.threads;
    m.at_barrier = 0;
    for (int i = 0; i < m.threads; ++i) {
        prepare(m.fibers[i]);
        m.fibers[i].done = m.fibers[i].at_barrier = false;
    }
    std::memset(m.shared, 0xff, sizeof m.shared);
    m.current = m.reversed ? m.threads - 1 : 0;
    if (_setjmp(m.main) == 0) resume(m.fibers[m.current]);
}

}  // namespace emulator
}  // namespace tree_attention
