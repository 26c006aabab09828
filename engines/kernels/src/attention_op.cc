#include "attention_op.h"

#include <algorithm>
#include <cstring>

#include "select.h"

namespace specexport {
namespace {

const float* norm(const Tensor& gamma, int64_t width) {
  expect(!gamma || gamma.count() == width, "a norm of heads has another width than they");
  return gamma ? gamma.floats() : nullptr;
}

}  // namespace

void attend_all(const Threads& threads, const Attention& call) {
  const int rows = call.heads / call.kv_heads * call.nodes;
  // As many rows a unit as leave eight units, so that threads end together.
  const int unit = std::max(1, std::min({kMaxRows, rows, rows * call.kv_heads / 8}));
  const int units = (rows + unit - 1) / unit;
  threads.each(static_cast<size_t>(units) * call.kv_heads, [&](size_t index) {
    thread_local std::vector<float> weights;
    const int kv_head = static_cast<int>(index) / units, first = static_cast<int>(index) % units * unit;
    const int count = std::min(unit, rows - first);
    const size_t room = static_cast<size_t>(call.slots) + static_cast<size_t>(call.list_stride) + 16;
    kernels().attend(call, kv_head, first, count, scratch(weights, static_cast<size_t>(count) * room));
  });
}

void use_tables(Attention& call, const Tensor& cosine, const Tensor& sine, int64_t largest) {
  expect(!cosine == !sine, "cosines and sines come together");
  if (!cosine) return;
  expect(cosine.dims.size() == 2 && cosine.dims == sine.dims && 2 * cosine.dims[1] <= call.width,
         "rotation tables must be [positions, pairs]");
  expect(largest < cosine.dims[0], "a position is beyond the rotation tables");
  call.rotated = static_cast<int>(cosine.dims[1]);
  call.cosine = cosine.floats();
  call.sine = sine.floats();
}

TreeAttention::TreeAttention(const Api& api, const OrtKernelInfo* info) : api_(api) {
  heads_ = integer(api, info, "num_heads");
  kv_heads_ = integer(api, info, "kv_num_heads");
  window_ = integer(api, info, "window");
  scale_ = real(api, info, "scale");
  epsilon_ = real(api, info, "epsilon");
  expect(kv_heads_ > 0 && heads_ > 0 && heads_ % kv_heads_ == 0, "num_heads must be a multiple of kv_num_heads");
}

void TreeAttention::compute(OrtKernelContext* context) {
  Tensor in[12];
  for (size_t i = 0; i < 12; ++i) in[i] = input(api_, context, i);
  const Tensor &query = in[0], &key = in[1], &value = in[2], &past_k = in[3], &past_v = in[4], &positions = in[7],
               &past = in[8], &tree = in[9];
  expect(past_k.dims.size() == 4 && past_k.dims[0] == 1 && past_k.dims[1] == kv_heads_ && past_k.dims == past_v.dims,
         "caches must be [1, kv_num_heads, slots, width]");
  const int64_t slots = past_k.dims[2], width = past_k.dims[3], nodes = positions.count();
  expect(width > 0 && width <= kLargestHead, "heads must have 1 to 1024 values");
  expect(slots <= INT32_MAX && nodes <= INT32_MAX, "caches or calls have too many rows");
  const bool packed = !key;
  const int64_t all = packed ? heads_ + 2 * kv_heads_ : heads_;
  expect(query.count() == nodes * all * width, "query has another size than positions and heads say");
  expect(packed == !value, "key and value come together");
  expect(packed || (key.count() == nodes * kv_heads_ * width && value.count() == key.count()),
         "key and value have another size than positions and heads say");
  expect((!tree || tree.count() == nodes * nodes) && past.count() == 1, "tree must be [1, T, T] and past [1]");
  Attention call{};
  call.nodes = call.list_stride = static_cast<int>(nodes);
  call.heads = heads_;
  call.kv_heads = kv_heads_;
  call.width = static_cast<int>(width);
  call.slots = static_cast<int>(slots);
  call.window = window_;
  call.scale = scale_;
  call.epsilon = epsilon_;
  call.query = query.floats();
  call.key = packed ? call.query + heads_ * width : key.floats();
  call.value = packed ? call.key + kv_heads_ * width : value.floats();
  call.query_stride = all * width;
  call.key_stride = call.value_stride = packed ? all * width : kv_heads_ * width;
  call.query_norm = norm(in[10], width);
  call.key_norm = norm(in[11], width);
  call.positions = positions.as<int64_t>();
  call.past = *past.as<int64_t>();
  call.tree = tree ? tree.as<uint8_t>() : nullptr;
  expect(call.past >= 0 && call.past <= slots - nodes, "the call does not fit the cache");
  int64_t largest = 0;
  for (int64_t t = 0; t < nodes; ++t) {
    expect(call.positions[t] >= 0, "a position is negative");
    expect(!tree || call.tree[t * nodes + t] != 0, "a node does not see itself");
    largest = std::max(largest, call.positions[t]);
  }
  use_tables(call, in[5], in[6], nodes > 0 ? largest : -1);
  call.output = output<float>(api_, context, 0, {1, nodes, heads_ * width});
  call.cache_k = present(context, 1, past_k);
  call.cache_v = present(context, 2, past_v);
  call.fresh_k = call.cache_k + call.past * width;
  call.fresh_v = call.cache_v + call.past * width;
  call.fresh_slots = slots;
  if (nodes == 0) return;
  thread_local std::vector<float> turned;
  thread_local std::vector<int32_t> lists;
  call.turned = scratch(turned, static_cast<size_t>(heads_ * nodes * width));
  call.lists = scratch(lists, static_cast<size_t>(nodes * nodes + nodes));
  call.counts = call.lists + nodes * nodes;
  if (!tree) std::fill_n(call.counts, nodes, -1);
  kernels().prepare(call);
  attend_all({api_, context}, call);
}

float* TreeAttention::present(OrtKernelContext* context, size_t index, const Tensor& past) const {
  float* cache = output<float>(api_, context, index, past.dims);
  expect(cache != nullptr, "both caches must be outputs");
  if (cache != past.data) std::memcpy(cache, past.data, sizeof(float) * static_cast<size_t>(past.count()));
  return cache;
}

}  // namespace specexport
