// The kernels of one instruction set, and what they work on.
//
// Whatever the set, results are the same to the last bit: integer sums are exact, and floating-point sums have 16 lanes,
// one order and one way to round (fused multiply-add) in all of them. And a row's results do not depend on the other
// rows of a call, which is what makes speculation lossless: a node's row is that of plain decoding.
#pragma once

#include <cstddef>
#include <cstdint>

namespace specexport {

constexpr int kLanes = 16;  // outputs of a panel, and lanes of every floating-point sum
constexpr int kTopBlock = 256;  // values that share a mark of how large they are at most
constexpr int kMaxRows = 4;  // rows of a tile of products, and of a unit of attention

// A matrix [outputs, width] of codes, packed. Panel p holds outputs 16 p to 16 p + 15: for every four columns the four
// codes of each output. Of 4-bit codes two such groups share their bytes, the first in the low halves.
struct Matrix {
  const uint8_t* codes;
  const float* scales;   // [panels, blocks, 16], or [panels, 16] where a row has one scale
  const int32_t* zeros;  // [panels, blocks, 16] as the kernel stores codes, or null: all are `zero`
  int32_t zero;          // as the kernel stores codes
  int outputs, width, block, blocks, bits;  // width: of whole blocks
  int panels;
  bool row_scales;
};

// Rows as 8-bit integers, a scale for each block.
struct Rows {
  const int8_t* codes;  // [rows, width]
  const float* scales;  // [rows, blocks]
  const int32_t* sums;  // [rows, blocks], of the codes
};

enum Gate { kNoGate = 0, kSilu = 1, kGeluTanh = 2 };

struct Attention {
  int nodes, heads, kv_heads, width, slots, window;  // window: 0 for none
  int rotated;  // pairs that are rotated: (i, i + rotated); 0 for none
  float scale, epsilon;
  const float *query, *key, *value;  // rows, `stride` apart each
  int64_t query_stride, key_stride, value_stride;
  const float *query_norm, *key_norm;  // [width] or null
  const float *cosine, *sine;          // [positions, rotated]
  const int64_t* positions;            // [nodes]
  int64_t past;
  const uint8_t* tree;  // bool [nodes, nodes], or null: lists and counts are given
  float *cache_k, *cache_v;  // [kv_heads, slots, width]
  float *fresh_k, *fresh_v;  // rows of the tree: row r of head h is at (h * fresh_slots + r) * width
  int64_t fresh_slots, fresh_first;  // the first of the call's own
  float* output;    // [nodes, heads * width]
  float* turned;    // scratch [heads, nodes, width]
  int32_t* lists;   // scratch [nodes, list_stride]: rows of the tree that a node sees, first to last
  int32_t* counts;  // scratch [nodes]: their number, or -1 where they are all up to itself and lie behind the cache's
  int list_stride;
};

struct Kernels {
  const char* name;
  bool signed_codes;  // 8-bit codes are stored minus 128
  // Sum and norm of a row: y = norm(x + skip) * gamma; `sum` may be null, `skip` too.
  void (*norm)(const float* x, const float* skip, const float* gamma, float epsilon, int width, float* sum, float* y);
  // One row as codes; columns from `width` to blocks * block are zero.
  void (*quantize)(const float* x, int width, int block, int blocks, int8_t* codes, float* scales, int32_t* sums);
  // Panels [first, first + count) of the product for all rows. With a gate, panels alternate between gate and value, and
  // the output has half as many columns.
  void (*product)(const Matrix&, const Rows&, int rows, int first, int count, Gate, float* out, int64_t out_stride);
  // Rotated queries to scratch, keys and values to the caches, lists of nodes. Once, before the units.
  void (*prepare)(const Attention&);
  // Attention of query rows [first, first + count) of a key head, count <= kMaxRows; row = node * group + head.
  // scratch: count * (slots + list_stride + 16) floats.
  void (*attend)(const Attention&, int kv_head, int first, int count, float* scratch);
  // Adds `other` to x in place and says what the sum's softmax is made of: its largest value, and the sum of e^(x -
  // largest). tops: the largest of each kTopBlock values.
  void (*survey)(float* x, const float* other, int count, float* tops, float* largest, float* sum);
};

extern const Kernels kGeneric;
#if defined(__x86_64__) || defined(_M_X64)
extern const Kernels kAvx2, kAvx512;
#elif defined(__aarch64__)
extern const Kernels kNeon;
#endif

}  // namespace specexport
