// The few machine operations the kernels use, for CUDA; emulator.h has the same ones for a host compiler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifndef __CUDACC__
#include "emulator.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace tree_attention {

// Threads of a block, and blocks that must fit a multiprocessor: the compiler has 65536 / (both) registers a thread.
#define TREE_ATTENTION_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define TREE_ATTENTION_DEVICE __device__ __forceinline__
#define TREE_ATTENTION_ANYWHERE __host__ __device__ __forceinline__
#define TREE_ATTENTION_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

TREE_ATTENTION_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
TREE_ATTENTION_DEVICE int thread_count() { return static_cast<int>(blockDim.x); }
TREE_ATTENTION_DEVICE int block_x() { return static_cast<int>(blockIdx.x); }
TREE_ATTENTION_DEVICE int block_y() { return static_cast<int>(blockIdx.y); }
TREE_ATTENTION_DEVICE int block_z() { return static_cast<int>(blockIdx.z); }
TREE_ATTENTION_DEVICE void sync_block() { __syncthreads(); }
TREE_ATTENTION_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
TREE_ATTENTION_DEVICE int shuffle_xor(int x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
TREE_ATTENTION_DEVICE bool any_lane(bool x) { return __any_sync(0xffffffffu, x) != 0; }
TREE_ATTENTION_DEVICE float exp2_fast(float x) { return exp2f(x); }
TREE_ATTENTION_DEVICE float round_even(float x) { return rintf(x); }

TREE_ATTENTION_DEVICE uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 (4) bytes from global to shared memory, zeros if not `valid`; asynchronous from sm_80 on.
TREE_ATTENTION_DEVICE void copy_async16(void* to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
#else
    *static_cast<uint4*>(to) = valid ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
#endif
}

TREE_ATTENTION_DEVICE void copy_async4(void* to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(valid ? 4 : 0)
                 : "memory");
#else
    *static_cast<uint32_t*>(to) = valid ? *static_cast<const uint32_t*>(from) : 0;
#endif
}

TREE_ATTENTION_DEVICE void commit_async() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until at most `pending` of this thread's groups are outstanding.
template <int pending>
TREE_ATTENTION_DEVICE void wait_async() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
TREE_ATTENTION_DEVICE void load_matrices(uint32_t (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

TREE_ATTENTION_DEVICE void load_matrices_transposed(uint32_t (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

struct Fp16 {
    static TREE_ATTENTION_DEVICE float to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
    static TREE_ATTENTION_DEVICE uint32_t pack(float low, float high) {
        const __half2 both = __floats2half2_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&both);
    }
    // c [16, 8] += a [16, 16] b [16, 8], in the register layout of mma.m16n8k16.
    static TREE_ATTENTION_DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
        // Turing multiplies 8 channels at a time, and the operands of 16 are those of 8 side by side.
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(b0));
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
    }
};

struct Bf16 {
    static TREE_ATTENTION_DEVICE float to_float(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
    static TREE_ATTENTION_DEVICE uint32_t pack(float low, float high) {
        const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&both);
    }
    static TREE_ATTENTION_DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
        __trap();  // the launcher refuses bf16 there
#endif
    }
};

TREE_ATTENTION_DEVICE float fp16_to_float(uint16_t bits) { return Fp16::to_float(bits); }

struct Device {
    int processors, shared_bytes;
    bool bf16;
};

inline int find_device(Device& device) {
    int index = 0, major = 0;
    cudaError_t error = cudaGetDevice(&index);
    if (!error) error = cudaDeviceGetAttribute(&device.processors, cudaDevAttrMultiProcessorCount, index);
    if (!error) error = cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    if (!error) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    device.bf16 = major >= 8;
    return static_cast<int>(error);
}

template <class Problem>
int launch(void (*kernel)(Problem), const Problem& problem, int x, int y, int z, int threads, int shared,
           void* stream) {
    if (shared > 48 * 1024) {
        const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
        if (error) return static_cast<int>(error);
    }
    kernel<<<dim3(x, y, z), threads, shared, static_cast<cudaStream_t>(stream)>>>(problem);
    return static_cast<int>(cudaGetLastError());
}

}  // namespace tree_attention
#endif
