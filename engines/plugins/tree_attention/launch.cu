// The C interface: checks a call, plans its launches and enqueues them. Also compiled as C++, with the emulator.
#include <utility>

#include "attend.cuh"
#include "combine.cuh"
#include "commit.cuh"

namespace tree_attention {
namespace {

// A build for one model can leave the other widths out.
#ifdef TREE_ATTENTION_HEAD_DIM
using HeadDims = std::integer_sequence<int, TREE_ATTENTION_HEAD_DIM>;
#else
using HeadDims = std::integer_sequence<int, 64, 80, 96, 128, 256>;
#endif

constexpr int kMaxNodes = 1 << 16, kMaxSlots = 1 << 24, kMaxHeads = 1 << 12, kMaxWindow = 1 << 30;
constexpr int kMaxSplits = 128, kMaxBlocks = 512, kStagedBytes = 48 * 1024;

template <int... D>
bool known(int head_dim, std::integer_sequence<int, D...>) {
    return ((head_dim == D) || ...);
}

bool positive(int x, int limit) { return x > 0 && x <= limit; }

int check_sizes(const SpecexportTreeAttention& call) {
    if (!positive(call.nodes, kMaxNodes) || !positive(call.slots, kMaxSlots) || !positive(call.heads, kMaxHeads) ||
        !positive(call.kv_heads, call.heads) || call.heads % call.kv_heads || call.committed < 0 ||
        call.committed > kMaxNodes || call.window < 0 || call.window > kMaxWindow)
        return SPECEXPORT_BAD_SHAPE;
    if (!known(call.head_dim, HeadDims())) return SPECEXPORT_BAD_HEAD_DIM;
    if (call.element < 0 || call.element > SPECEXPORT_BF16 || call.cache < 0 || call.cache > SPECEXPORT_CACHE_E4M3)
        return SPECEXPORT_BAD_TYPE;
    return SPECEXPORT_OK;
}

int check_pointers(const Problem& p) {
    const void* needed[] = {p.query, p.key, p.value, p.cache_k, p.cache_v, p.output};
    for (const void* pointer : needed)
        if (!pointer || reinterpret_cast<uintptr_t>(pointer) % 16) return SPECEXPORT_BAD_POINTER;
    const void* commit = p.committed ? p.commit : p.order;
    const void* scales[] = {p.cache ? static_cast<const void*>(p.scale_k) : p.tree,
                            p.cache ? static_cast<const void*>(p.scale_v) : p.tree};
    const void* words[] = {p.tree, p.positions, p.past, p.write, p.order, commit, scales[0], scales[1]};
    for (const void* pointer : words)
        if (!pointer || reinterpret_cast<uintptr_t>(pointer) % 4) return SPECEXPORT_BAD_POINTER;
    return SPECEXPORT_OK;
}

int blocks(const Problem& p) { return row_blocks(p) * p.kv_heads; }

// Splits that are ever used, on any device: the workspace is sized for them.
int most_splits(const Problem& p) {
    const int fill = kMaxBlocks / blocks(p) > 1 ? kMaxBlocks / blocks(p) : 1;
    return clamp(fill, 1, clamp(ceil_div(p.slots, tile_columns(p.head_dim)), 1, kMaxSplits));
}

size_t workspace(const Problem& p) {
    const int splits = most_splits(p);
    return splits == 1 ? 0 : size_t(p.kv_heads) * p.rows * splits * (p.head_dim + 2) * sizeof(float);
}

Problem plan_sizes(const SpecexportTreeAttention& call) {
    Problem p = {};
    static_cast<SpecexportTreeAttention&>(p) = call;
    p.words = ceil_div(p.nodes, 32);
    p.rows = p.heads / p.kv_heads * p.nodes;
    const int most = p.head_dim <= 128 ? Tile<128, false>::kMaxRowGroups
                     : p.cache         ? Tile<256, true>::kMaxRowGroups
                                       : Tile<256, false>::kMaxRowGroups;
    const int needed = p.rows <= kRowGroup ? 1 : p.rows <= 2 * kRowGroup ? 2 : 4;
    p.row_groups = needed < most ? needed : most;
    return p;
}

int cuda(int error) { return error ? SPECEXPORT_CUDA_ERROR + error : SPECEXPORT_OK; }

int launch_commit(Problem& p, void* stream) {
    const int vectors = p.head_dim / (p.cache ? 16 : 8);
    // Many rows are spread over more blocks; each chunk is at least half a sector pair wide.
    p.chunk = p.committed + p.nodes > 32 && vectors > 4 ? 4 : vectors;
    while (p.chunk > 1 && p.committed * (p.chunk * 16 + 4) > kStagedBytes) p.chunk = ceil_div(p.chunk, 2);
    const int shared = p.committed * (p.chunk * 16 + 4);
    if (shared > kStagedBytes) return SPECEXPORT_BAD_COMMIT;
    const bool bf16 = p.element == SPECEXPORT_BF16;
    const auto kernel = p.cache ? (bf16 ? commit<Bf16, true> : commit<Fp16, true>)
                                : (bf16 ? commit<Bf16, false> : commit<Fp16, false>);
    return cuda(launch(kernel, p, ceil_div(vectors, p.chunk), p.kv_heads, 2, kThreads, shared, stream));
}

template <class Element, int D, bool kCodes>
int launch_attend(Problem& p, const Device& device, void* stream) {
    p.stages = Tile<D, kCodes>::shared_bytes(2) <= device.shared_bytes ? 2 : 1;
    return cuda(launch(attend<Element, D, kCodes>, p, p.splits, row_blocks(p), p.kv_heads, kThreads,
                       Tile<D, kCodes>::shared_bytes(p.stages), stream));
}

template <class Element, bool kCodes, int... D>
int launch_attend(Problem& p, const Device& device, void* stream, std::integer_sequence<int, D...>) {
    int result = SPECEXPORT_BAD_HEAD_DIM;
    (void)((p.head_dim == D ? (result = launch_attend<Element, D, kCodes>(p, device, stream), true) : false) || ...);
    return result;
}

int enqueue(Problem& p, void* stream) {
    Device device = {};
    if (const int error = find_device(device)) return cuda(error);
    if (p.element == SPECEXPORT_BF16 && !device.bf16) return SPECEXPORT_BAD_TYPE;
    p.processors = device.processors;
    p.splits = clamp(2 * device.processors / blocks(p), 1, most_splits(p));
    if (p.splits > 1) {
        if (p.workspace_bytes < workspace(p)) return SPECEXPORT_BAD_WORKSPACE;
        if (!p.workspace || reinterpret_cast<uintptr_t>(p.workspace) % 16) return SPECEXPORT_BAD_POINTER;
        p.partial = static_cast<float*>(p.workspace);
        p.summary = p.partial + size_t(p.kv_heads) * p.rows * p.splits * p.head_dim;
    }
    if (const int error = launch_commit(p, stream)) return error;
    const bool bf16 = p.element == SPECEXPORT_BF16;
    const HeadDims dims;
    const int error = p.cache ? (bf16 ? launch_attend<Bf16, true>(p, device, stream, dims)
                                      : launch_attend<Fp16, true>(p, device, stream, dims))
                              : (bf16 ? launch_attend<Bf16, false>(p, device, stream, dims)
                                      : launch_attend<Fp16, false>(p, device, stream, dims));
    if (error || p.splits == 1) return error;
    return cuda(launch(bf16 ? combine<Bf16> : combine<Fp16>, p, ceil_div(p.rows, kWarps), p.kv_heads, 1, kThreads, 0,
                       stream));
}

}  // namespace
}  // namespace tree_attention

extern "C" {

int tree_attention_workspace(const SpecexportTreeAttention* call, size_t* bytes) {
    if (!call || !bytes) return SPECEXPORT_BAD_POINTER;
    if (const int error = tree_attention::check_sizes(*call)) return error;
    *bytes = tree_attention::workspace(tree_attention::plan_sizes(*call));
    return SPECEXPORT_OK;
}

int tree_attention_enqueue(const SpecexportTreeAttention* call, void* stream) {
    if (!call) return SPECEXPORT_BAD_POINTER;
    if (const int error = tree_attention::check_sizes(*call)) return error;
    tree_attention::Problem problem = tree_attention::plan_sizes(*call);
    if (const int error = tree_attention::check_pointers(problem)) return error;
    return tree_attention::enqueue(problem, stream);
}

const char* tree_attention_error(int code) {
    switch (code) {
        case SPECEXPORT_OK: return "no error";
        case SPECEXPORT_BAD_SHAPE: return "a size is not positive or too large, or heads are no multiple of kv_heads";
        case SPECEXPORT_BAD_HEAD_DIM: return "head_dim is none of 64, 80, 96, 128, 256";
        case SPECEXPORT_BAD_TYPE: return "unknown element or cache type, or bf16 on a device without it (before sm_80)";
        case SPECEXPORT_BAD_POINTER: return "a tensor is missing or not aligned to 16 bytes";
        case SPECEXPORT_BAD_WORKSPACE: return "the workspace is smaller than tree_attention_workspace says";
        case SPECEXPORT_BAD_COMMIT: return "more committed rows than shared memory holds";
        default: return code > SPECEXPORT_CUDA_ERROR ? "CUDA failed (the code less 1000 is its cudaError_t)" : "unknown";
    }
}

size_t tree_attention_call_size(void) { return sizeof(SpecexportTreeAttention); }
}
