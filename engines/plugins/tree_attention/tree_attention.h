/* C interface of the TreeAttention kernels: one attention layer of a speculative step, cache commit included.
 *
 * The names and shapes are those of the target graph (runtime/contract.py). T nodes, Hq query heads, Hkv key-value heads
 * (Hq a multiple of Hkv), D channels, S cache slots, A committed rows. All tensors are dense, row-major, in device
 * memory and 16-byte aligned. One call
 *
 *   1. moves rows: with joined = [cache rows commit[0..A), new rows], cache row write + b = joined[order[b]] for b in
 *      [0, A + T). Every source is read before any row is written, so they may overlap. Rows outside 0..S-1 are skipped;
 *   2. attends: node i sees cache row c < past, and row past + j where bit j of tree row i is set; with a window w > 0
 *      only rows whose position p satisfies positions[i] - p < w (a committed row's position is its index).
 *
 * Caches of bytes hold codes with one float scale per row and head, value = code * scale: int8 with scale = max|x| / 127,
 * or e4m3 with scale = max|x| / 448. A move takes codes and scales as they are; nothing is rounded twice. */
#ifndef SPECEXPORT_TREE_ATTENTION_H
#define SPECEXPORT_TREE_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SPECEXPORT_API __attribute__((visibility("default")))

enum { SPECEXPORT_FP16 = 0, SPECEXPORT_BF16 = 1 };
enum { SPECEXPORT_CACHE_ELEMENTS = 0, SPECEXPORT_CACHE_INT8 = 1, SPECEXPORT_CACHE_E4M3 = 2 };
enum {
    SPECEXPORT_OK = 0,
    SPECEXPORT_BAD_SHAPE = 1,     /* a size is not positive, heads are no multiple of kv_heads, or products overflow */
    SPECEXPORT_BAD_HEAD_DIM = 2,  /* not 64, 80, 96, 128 or 256 */
    SPECEXPORT_BAD_TYPE = 3,      /* unknown element or cache type, or bf16 on a device without it */
    SPECEXPORT_BAD_POINTER = 4,   /* null where a tensor is needed, or not 16-byte aligned */
    SPECEXPORT_BAD_WORKSPACE = 5, /* smaller than tree_attention_workspace says */
    SPECEXPORT_BAD_COMMIT = 6,    /* more committed rows than can be staged in shared memory */
    SPECEXPORT_CUDA_ERROR = 1000  /* plus the cudaError_t */
};

typedef struct {
    int32_t nodes, heads, kv_heads, head_dim, slots, committed; /* T, Hq, Hkv, D, S, A */
    int32_t window;                                             /* 0: none */
    int32_t element, cache;                                     /* of the enums above */
    float scale;                                                /* of scores before the softmax */
    const void *query;                                          /* [Hq, T, D], rotated */
    const void *key, *value;                                    /* [Hkv, T, D], the key rotated */
    void *cache_k, *cache_v;                                    /* [Hkv, S, D], updated in place */
    float *scale_k, *scale_v;                                   /* [Hkv, S], updated in place; null without codes */
    const uint32_t *tree;                                       /* [T, ceil(T / 32)], bit j % 32 of word j / 32 */
    const int32_t *positions;                                   /* [T] */
    const int32_t *past, *write;                                /* [1] */
    const int32_t *commit, *order;                              /* [A], [A + T] */
    void *output;                                               /* [Hq, T, D] */
    void *workspace;
    size_t workspace_bytes;
} SpecexportTreeAttention;

/* Bytes of workspace a call of these sizes needs on any device; reads no pointer. Returns an error code. */
SPECEXPORT_API int tree_attention_workspace(const SpecexportTreeAttention *call, size_t *bytes);

/* Enqueue the call on a CUDA stream. Nothing depends on values in device memory, so it can be captured in a graph. */
SPECEXPORT_API int tree_attention_enqueue(const SpecexportTreeAttention *call, void *stream);

/* What an error code means, in one line. The string is static. */
SPECEXPORT_API const char *tree_attention_error(int code);

/* Size of SpecexportTreeAttention, for callers that declare it themselves. */
SPECEXPORT_API size_t tree_attention_call_size(void);

#ifdef __cplusplus
}
#endif
#endif
