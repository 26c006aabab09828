#include "grow_op.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>

#include "select.h"

namespace specexport {
namespace {

// Larger trees than any use; sizes made of them stay small.
constexpr int kMostDepth = 64, kMostNodes = 4096, kMostBranches = 64;

// Memory for the floats of a call, cut into pieces.
class Arena {
 public:
  float* take(int64_t count) {
    const size_t from = used_;
    used_ += (static_cast<size_t>(count) + 15) & ~size_t{15};
    return memory_ == nullptr ? nullptr : memory_ + from;
  }
  size_t used() const { return used_; }
  void use(float* memory) { memory_ = memory, used_ = 0; }

 private:
  float* memory_ = nullptr;
  size_t used_ = 0;
};

// The places of the `count` best scores, the best first; of equal ones the earlier comes first.
std::vector<int32_t> best_places(const float* scores, size_t size, size_t count) {
  std::vector<int32_t> places(size);
  for (size_t i = 0; i < size; ++i) places[i] = static_cast<int32_t>(i);
  count = std::min(count, size);
  std::partial_sort(places.begin(), places.begin() + static_cast<ptrdiff_t>(count), places.end(),
                    [scores](int32_t a, int32_t b) {
                      return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
                    });
  places.resize(count);
  return places;
}

}  // namespace

struct GrowTree::Call {
  Tensor in[kMatrices];
  int64_t length = 0, rows = 0, ids = 0, embedding = 0;  // stable rows; rows of the vocabulary; ids; He
  int64_t slots = 0, width = 0;                         // of the caches
  int hidden = 0;

  const float* gamma(Input which) const { return in[which] ? in[which].floats() : nullptr; }
};

struct GrowTree::Pool {
  std::vector<int64_t> tokens, parents;  // a parent is a place in the pool, -1 for the root
  std::vector<float> scores;
};

struct GrowTree::Level {
  std::vector<int64_t> tokens;
  std::vector<float> scores;                // of their paths
  std::vector<int64_t> numbers;             // in the pool
  std::vector<std::vector<int32_t>> paths;  // rows of the tree that each sees, itself last
  std::vector<float> states;                // [nodes, H], what they feed on
  std::vector<float> tree_k, tree_v;        // [Hkv, topk * (depth - 1), D], of all depths
  int64_t tree_rows = 0;
  std::vector<float> found_scores;          // [nodes, topk], the best continuations of each
  std::vector<int32_t> found_rows, found;   // and their rows of the vocabulary; [nodes], how many there are
};

GrowTree::GrowTree(const Api& api, const OrtKernelInfo* info) : api_(api) {
  heads_ = integer(api, info, "num_heads");
  kv_heads_ = integer(api, info, "kv_num_heads");
  topk_ = integer(api, info, "topk");
  depth_ = integer(api, info, "depth");
  nodes_ = integer(api, info, "nodes");
  hidden_first_ = integer(api, info, "hidden_first") != 0;
  norm_residual_ = integer(api, info, "norm_residual") != 0;
  feed_normed_ = integer(api, info, "feed_normed") != 0;
  const int gate = integer(api, info, "gate");
  scale_ = real(api, info, "scale");
  epsilon_ = real(api, info, "epsilon");
  least_ = real(api, info, "least");
  expect(kv_heads_ > 0 && heads_ > 0 && heads_ % kv_heads_ == 0, "num_heads must be a multiple of kv_num_heads");
  expect(topk_ > 0 && topk_ <= kMostBranches && depth_ > 0 && depth_ <= kMostDepth && nodes_ > 0 && nodes_ <= kMostNodes,
         "topk must be 1 to 64, depth 1 to 64 and nodes 1 to 4096");
  expect(gate == kSilu || gate == kGeluTanh, "gate must be 1 or 2");
  gate_ = static_cast<Gate>(gate);
  fuse_ = part(info, "fuse", 0, kNoGate);
  qkv_ = part(info, "qkv", 1, kNoGate);
  output_ = part(info, "output", 2, kNoGate);
  gate_up_ = part(info, "gate_up", 3, gate_);
  down_ = part(info, "down", 4, kNoGate);
  lm_head_ = part(info, "lm_head", 5, kNoGate);
  const auto outputs = [](const Part& part) { return part.matrix->view().outputs; };
  const int hidden = lm_head_.width;
  expect(outputs(output_) == hidden && gate_up_.width == hidden && outputs(down_) == hidden &&
             down_.width == outputs(gate_up_) / 2 && (!fuse_.matrix || (outputs(fuse_) == hidden && qkv_.width == hidden)),
         "the matrices do not fit each other");
}

GrowTree::Part GrowTree::part(const OrtKernelInfo* info, const char* name, int place, Gate gate) const {
  const std::string stem(name);
  const int width = integer(api_, info, (stem + "_width").c_str());
  if (width == 0 && place == 0) return {};
  const int bits = integer(api_, info, (stem + "_bits").c_str()), block = integer(api_, info, (stem + "_block").c_str());
  return {packed_constant(api_, info, static_cast<size_t>(kMatrices + 3 * place), 0, width, bits, block, gate), width};
}

GrowTree::Call GrowTree::read(const OrtKernelContext* context) const {
  Call call;
  for (size_t i = 0; i < kMatrices; ++i) call.in[i] = input(api_, context, i);
  const Tensor &noise = call.in[kNoise], &cache = call.in[kCacheK], &table = call.in[kEmbedding],
               &codes = call.in[kEmbeddingCodes], &scales = call.in[kEmbeddingScales], &ids = call.in[kVocabulary];
  const int64_t vocabulary = lm_head_.matrix->view().outputs;
  call.hidden = lm_head_.width;
  expect(call.in[kLogits].count() == vocabulary, "logits must be one row of the lm_head");
  expect(call.in[kState].count() == call.hidden, "state must be one row as wide as the lm_head");
  expect(noise.dims.size() == 2 && noise.dims[0] == depth_ && noise.dims[1] >= topk_ && noise.dims[1] <= vocabulary,
         "noise must be [depth, rows] with topk to as many rows as the lm_head has");
  call.rows = noise.dims[1];
  expect(cache.dims.size() == 4 && cache.dims[0] == 1 && cache.dims[1] == kv_heads_ &&
             cache.dims == call.in[kCacheV].dims,
         "caches must be [1, kv_num_heads, slots, width]");
  call.slots = cache.dims[2], call.width = cache.dims[3];
  expect(call.width > 0 && call.width <= kLargestHead, "heads must have 1 to 1024 values");
  expect(call.slots <= INT32_MAX, "caches have too many rows");
  expect(qkv_.matrix->view().outputs == (heads_ + int64_t{2} * kv_heads_) * call.width &&
             output_.width == heads_ * call.width,
         "the matrices of attention do not fit its heads");
  expect(call.in[kPast].count() == 1 && call.in[kTokens].dims.size() == 2, "past must be [1] and tokens [1, A]");
  const int64_t past = *call.in[kPast].as<int64_t>(), fresh = call.in[kTokens].dims[1];
  expect(past >= 0 && past <= call.slots - fresh && past + fresh > 0, "past and tokens do not fit the cache");
  call.length = past + fresh;
  expect(!table != !codes && !codes == !scales, "there must be an embedding, or its codes and scales");
  const Tensor& embedding = table ? table : codes;
  expect(embedding.dims.size() == 2 && embedding.dims[0] > 0 && embedding.dims[1] > 0, "the embedding must be [ids, He]");
  call.ids = embedding.dims[0], call.embedding = embedding.dims[1];
  expect(!scales || (scales.count() > 0 && scales.count() % call.ids == 0 &&
                     call.embedding % (scales.count() / call.ids) == 0),
         "the embedding's scales must be [ids, blocks]");
  expect((fuse_.matrix ? fuse_.width : qkv_.width) == call.embedding + call.hidden,
         "embedding and state are not as wide as what reads them");
  expect(!ids || ids.count() == vocabulary, "the vocabulary must have an id for each row of the lm_head");
  expect(ids || call.rows <= call.ids, "the lm_head has rows that are no ids");
  for (Input which : {kEmbeddingNorm, kHiddenNorm, kInputNorm, kMlpNorm, kNorm, kQueryNorm, kKeyNorm}) {
    const bool of_heads = which == kQueryNorm || which == kKeyNorm;
    const int64_t width = which == kEmbeddingNorm ? call.embedding : of_heads ? call.width : call.hidden;
    expect(!call.in[which] || call.in[which].count() == width, "a norm has another width than what it norms");
  }
  expect(fuse_.matrix || !call.in[kInputNorm], "without fuse the layer's input has no norm of its own");
  expect(call.in[kNorm] || !feed_normed_, "there is no norm to feed back");
  const Part* parts[] = {&fuse_, &qkv_, &output_, &gate_up_, &down_, &lm_head_};
  for (size_t i = 0; i < std::size(parts); ++i)
    if (parts[i]->matrix) expect_packed_zeros(api_, context, kMatrices + 3 * i + 2, parts[i]->matrix->view());
  return call;
}

void GrowTree::embed(const Call& call, int64_t token, float* row) const {
  const auto width = static_cast<size_t>(call.embedding), at = static_cast<size_t>(token);
  if (call.in[kEmbedding]) {
    std::memcpy(row, call.in[kEmbedding].floats() + at * width, sizeof(float) * width);
    return;
  }
  const auto blocks = static_cast<size_t>(call.in[kEmbeddingScales].count() / call.ids), block = width / blocks;
  const int8_t* codes = call.in[kEmbeddingCodes].as<int8_t>() + at * width;
  const float* scales = call.in[kEmbeddingScales].floats() + at * blocks;
  for (size_t b = 0; b < blocks; ++b)
    for (size_t i = b * block; i < (b + 1) * block; ++i) row[i] = static_cast<float>(codes[i]) * scales[b];
}

// The layer on all nodes of a level; their best continuations, and the states that these feed on.
void GrowTree::expand(const Threads& threads, const Call& call, int depth, Level& level) const {
  const int64_t count = static_cast<int64_t>(level.tokens.size()), hidden = call.hidden, joined = call.embedding + hidden;
  const Matrix& qkv = qkv_.matrix->view();
  const int64_t mixed_width = heads_ * call.width, gated = down_.width;
  Arena arena;
  float *x = nullptr, *residual = nullptr, *fused = nullptr, *projected = nullptr, *turned = nullptr, *mixed = nullptr,
        *attended = nullptr, *sum = nullptr, *active = nullptr, *down = nullptr, *next = nullptr, *normed = nullptr,
        *logits = nullptr;
  const auto lay_out = [&] {
    x = arena.take(count * joined), residual = arena.take(count * hidden), fused = arena.take(count * hidden);
    projected = arena.take(count * qkv.outputs), turned = arena.take(count * mixed_width);
    mixed = arena.take(count * mixed_width), attended = arena.take(count * hidden), sum = arena.take(count * hidden);
    active = arena.take(count * gated), down = arena.take(count * hidden), next = arena.take(count * hidden);
    normed = arena.take(count * hidden), logits = arena.take(count * lm_head_.matrix->view().outputs);
  };
  lay_out();
  thread_local std::vector<float> memory;
  arena.use(scratch(memory, arena.used()));
  lay_out();

  const auto norm = [&](const float* from, Input which, int64_t width, float* to) {
    if (call.gamma(which) == nullptr)
      std::memcpy(to, from, sizeof(float) * static_cast<size_t>(width));
    else
      kernels().norm(from, nullptr, call.gamma(which), epsilon_, static_cast<int>(width), nullptr, to);
  };
  thread_local std::vector<float> embedded;
  for (int64_t r = 0; r < count; ++r) {
    float *row = x + r * joined, *of_hidden = hidden_first_ ? row : row + call.embedding;
    const float* state = level.states.data() + r * hidden;
    embed(call, level.tokens[static_cast<size_t>(r)], scratch(embedded, static_cast<size_t>(call.embedding)));
    norm(embedded.data(), kEmbeddingNorm, call.embedding, hidden_first_ ? row + hidden : row);
    norm(state, kHiddenNorm, hidden, of_hidden);
    std::memcpy(residual + r * hidden, norm_residual_ ? of_hidden : state, sizeof(float) * static_cast<size_t>(hidden));
  }
  const auto product = [&](const Part& part, const float* from, const float* skip, const float* gamma, Gate gate,
                           float* kept, float* to) {
    multiply(threads, part.matrix->view(), {count, part.width, from, skip, gamma, epsilon_, gate, kept, to});
  };
  const float *layer_input = x, *added_to = residual;
  if (fuse_.matrix) {
    product(fuse_, x, nullptr, nullptr, kNoGate, nullptr, fused);
    layer_input = added_to = fused;
  }
  product(qkv_, layer_input, nullptr, fuse_.matrix ? call.gamma(kInputNorm) : nullptr, kNoGate, nullptr, projected);

  Attention attention{};
  attention.nodes = static_cast<int>(count);
  attention.heads = heads_, attention.kv_heads = kv_heads_;
  attention.width = static_cast<int>(call.width), attention.slots = static_cast<int>(call.slots);
  attention.scale = scale_, attention.epsilon = epsilon_;
  attention.query = projected;
  attention.key = projected + mixed_width, attention.value = attention.key + kv_heads_ * call.width;
  attention.query_stride = attention.key_stride = attention.value_stride = qkv.outputs;
  attention.query_norm = call.gamma(kQueryNorm), attention.key_norm = call.gamma(kKeyNorm);
  const std::vector<int64_t> positions(static_cast<size_t>(count), call.length + depth - 1);
  use_tables(attention, call.in[kCosine], call.in[kSine], positions[0]);
  attention.positions = positions.data();
  attention.past = call.length;
  attention.cache_k = const_cast<float*>(call.in[kCacheK].floats());  // only read: what is new goes to the tree's rows
  attention.cache_v = const_cast<float*>(call.in[kCacheV].floats());
  attention.fresh_k = level.tree_k.data(), attention.fresh_v = level.tree_v.data();
  attention.fresh_slots = static_cast<int64_t>(topk_) * (depth_ - 1), attention.fresh_first = level.tree_rows;
  attention.list_stride = depth_;
  std::vector<int32_t> lists(static_cast<size_t>(count * depth_)), counts(static_cast<size_t>(count), depth);
  for (size_t r = 0; r < level.paths.size(); ++r)
    std::copy(level.paths[r].begin(), level.paths[r].end(), lists.begin() + static_cast<ptrdiff_t>(r) * depth_);
  attention.lists = lists.data(), attention.counts = counts.data();
  attention.output = mixed, attention.turned = turned;
  kernels().prepare(attention);
  attend_all(threads, attention);
  level.tree_rows += count;

  product(output_, mixed, nullptr, nullptr, kNoGate, nullptr, attended);
  product(gate_up_, added_to, attended, call.in[kMlpNorm].floats(), gate_, sum, active);
  product(down_, active, nullptr, nullptr, kNoGate, nullptr, down);
  if (feed_normed_) {
    for (int64_t r = 0; r < count; ++r)
      kernels().norm(sum + r * hidden, down + r * hidden, call.gamma(kNorm), epsilon_, call.hidden, next + r * hidden,
                     normed + r * hidden);
    product(lm_head_, normed, nullptr, nullptr, kNoGate, nullptr, logits);
  } else {
    product(lm_head_, sum, down, call.gamma(kNorm), kNoGate, next, logits);
  }
  level.states.assign(feed_normed_ ? normed : next, (feed_normed_ ? normed : next) + count * hidden);
  find_best(threads, call, depth, count, logits, level);
}

// The topk best continuations of each row of logits, the best first; of equal ones that of the lower row.
void GrowTree::find_best(const Threads& threads, const Call& call, int depth, int64_t rows, float* logits,
                         Level& level) const {
  const auto k = static_cast<size_t>(topk_);
  const int64_t stride = lm_head_.matrix->view().outputs;
  const float* noise = call.in[kNoise].floats() + depth * call.rows;
  level.found_scores.resize(static_cast<size_t>(rows) * k);
  level.found_rows.resize(static_cast<size_t>(rows) * k);
  level.found.assign(static_cast<size_t>(rows), 0);
  threads.each(static_cast<size_t>(rows), [&](size_t row) {
    thread_local std::vector<float> tops;
    float *x = logits + static_cast<int64_t>(row) * stride, *scores = level.found_scores.data() + row * k;
    int32_t* places = level.found_rows.data() + row * k;
    const auto n = static_cast<int>(call.rows);
    float largest = 0, sum = 0;
    kernels().survey(x, noise, n, scratch(tops, static_cast<size_t>(n / kTopBlock + 1)), &largest, &sum);
    if (!std::isfinite(largest) || !std::isfinite(sum)) return;  // nothing can be said of it
    size_t found = 0;
    float bound = -std::numeric_limits<float>::infinity();
    for (int begin = 0; begin < n; begin += kTopBlock) {
      if (!(tops[static_cast<size_t>(begin / kTopBlock)] > bound)) continue;
      for (int i = begin; i < std::min(begin + kTopBlock, n); ++i) {
        if (!(x[i] > bound)) continue;
        size_t place = std::min(found, k - 1);
        for (; place > 0 && x[i] > scores[place - 1]; --place)
          scores[place] = scores[place - 1], places[place] = places[place - 1];
        scores[place] = x[i], places[place] = i;
        found = std::min(found + 1, k);
        if (found == k) bound = scores[k - 1];
      }
    }
    const float total = largest + std::log(sum);
    for (size_t i = 0; i < found; ++i) scores[i] -= total;
    level.found[row] = static_cast<int32_t>(found);
  });
}

void GrowTree::compute(OrtKernelContext* context) {
  const Call call = read(context);
  Pool pool;
  grow({api_, context}, call, pool);
  select(context, pool);
}

void GrowTree::grow(const Threads& threads, const Call& call, Pool& pool) const {
  const auto k = static_cast<size_t>(topk_), hidden = static_cast<size_t>(call.hidden);
  Level level;
  const auto tree_rows = static_cast<size_t>(kv_heads_ * call.width * topk_ * (depth_ - 1));
  level.tree_k.resize(tree_rows), level.tree_v.resize(tree_rows);
  std::vector<float> root(call.in[kLogits].floats(), call.in[kLogits].floats() + call.in[kLogits].count());
  find_best(threads, call, 0, 1, root.data(), level);
  level.scores.assign(1, 0.0f), level.numbers.assign(1, -1);
  level.states.assign(call.in[kState].floats(), call.in[kState].floats() + hidden);
  level.paths.assign(1, {});
  for (int depth = 1;; ++depth) {
    // Every continuation goes to the pool, and the best of this depth are what the next one expands.
    const size_t begin = pool.tokens.size();
    std::vector<int32_t> from;
    for (size_t r = 0; r < level.found.size(); ++r)
      for (size_t i = 0; i < static_cast<size_t>(level.found[r]); ++i) {
        int64_t token = level.found_rows[r * k + i];
        if (call.in[kVocabulary]) token = call.in[kVocabulary].as<int64_t>()[token];
        expect(token >= 0 && token < call.ids, "the vocabulary has an id that the embedding has not");
        pool.tokens.push_back(token);
        pool.parents.push_back(level.numbers[r]);
        pool.scores.push_back(level.scores[r] + level.found_scores[r * k + i]);
        from.push_back(static_cast<int32_t>(r));
      }
    if (depth == depth_) break;
    const std::vector<int32_t> chosen = best_places(pool.scores.data() + begin, pool.scores.size() - begin, k);
    Level next;
    next.tree_k.swap(level.tree_k), next.tree_v.swap(level.tree_v);
    next.tree_rows = level.tree_rows;
    double right = 0;
    for (int32_t place : chosen) {
      const size_t number = begin + static_cast<size_t>(place), parent = static_cast<size_t>(from[static_cast<size_t>(place)]);
      right += std::exp(static_cast<double>(pool.scores[number]));
      next.tokens.push_back(pool.tokens[number]);
      next.scores.push_back(pool.scores[number]);
      next.numbers.push_back(static_cast<int64_t>(number));
      next.paths.push_back(level.paths[parent]);
      next.paths.back().push_back(static_cast<int32_t>(next.tree_rows + static_cast<int64_t>(next.paths.size()) - 1));
      const float* state = level.states.data() + parent * hidden;
      next.states.insert(next.states.end(), state, state + hidden);
    }
    if (chosen.empty() || right < least_) break;
    expand(threads, call, depth, next);
    level = std::move(next);
  }
}

// The best of the pool in the order they came. A child never beats its parent, and of equal scores the earlier wins (the
// parent), so ancestors are always in.
void GrowTree::select(OrtKernelContext* context, const Pool& pool) const {
  std::vector<int32_t> kept = best_places(pool.scores.data(), pool.scores.size(), static_cast<size_t>(nodes_));
  std::sort(kept.begin(), kept.end());
  std::vector<int64_t> place(pool.tokens.size(), 0);
  const auto count = static_cast<int64_t>(kept.size());
  auto* tokens = output<int64_t>(api_, context, 0, {count});
  auto* parents = output<int64_t>(api_, context, 1, {count});
  auto* scores = output<float>(api_, context, 2, {count});
  if (count == 0) return;  // an empty tensor has no memory
  expect(tokens != nullptr && parents != nullptr && scores != nullptr, "all three outputs must be there");
  for (size_t i = 0; i < kept.size(); ++i) {
    const auto number = static_cast<size_t>(kept[i]);
    place[number] = static_cast<int64_t>(i) + 1;
    tokens[i] = pool.tokens[number];
    parents[i] = pool.parents[number] < 0 ? 0 : place[static_cast<size_t>(pool.parents[number])];
    scores[i] = pool.scores[number];
  }
}

}  // namespace specexport
