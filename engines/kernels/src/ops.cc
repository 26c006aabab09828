// The operators of domain "specexport" for ONNX Runtime's CPU provider.
//
// QuantizedProduct: y = norm(x + skip) times a matrix of codes, maybe gated.
//   x [.., K] f32; codes, scales, zeros? as MatMulNBits has them, constant; gamma? [K] f32; skip? [.., K] f32
//   -> y [.., N] or with a gate [.., N / 2]; sum? [.., K] = x + skip
//   attributes N, K, bits, block_size, gate (0 none, 1 silu, 2 tanh gelu; of the first half of N on the second), epsilon
// TreeAttention: rotation, cache and attention of a layer.
//   query [1, T, Hq D] or all three packed, key? [1, T, Hkv D], value?, past_k [1, Hkv, S, D], past_v, cos? [P, R], sin?,
//   positions [1, T] i64, past [1] i64, tree [1, T, T] bool, query_norm? [D], key_norm? [D]
//   -> [1, T, Hq D], present_k, present_v (where they are bound to the same memory nothing is copied)
//   attributes num_heads, kv_num_heads, window (0 none), scale, epsilon
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iterator>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "ort_abi.h"
#include "packed.h"
#include "select.h"

namespace specexport {
namespace {

// Calls whose rows and codes are less work than this, in products, are not worth a second thread.
constexpr double kSerialWork = 150e3;
// And rows of fewer values than this are not worth one to be made ready.
constexpr int64_t kSerialValues = 2048;
// Sums of a block's products of codes, at most 256 * 127 each, stay within 31 bits.
constexpr int kLargestBlock = 65536;
// More outputs or values of a row than any model has; sizes made of them stay within 63 bits.
constexpr int kLargestSize = 1 << 27;

void check(const Api& api, OrtStatus* status) {
  if (status == nullptr) return;
  api.free_status(status);
  throw std::runtime_error("onnxruntime refused a call");
}

void expect(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

struct Tensor {
  const void* data = nullptr;
  std::vector<int64_t> dims;

  explicit operator bool() const { return data != nullptr; }
  const float* floats() const { return static_cast<const float*>(data); }
  int64_t count() const {
    int64_t all = 1;
    for (int64_t dim : dims) all *= dim;
    return all;
  }
};

Tensor read(const Api& api, const OrtValue* value) {
  Tensor found;
  if (value == nullptr) return found;
  void* data = nullptr;
  check(api, api.data(const_cast<OrtValue*>(value), &data));
  OrtShape* shape = nullptr;
  check(api, api.shape(value, &shape));
  size_t rank = 0;
  OrtStatus* status = api.dim_count(shape, &rank);
  found.dims.resize(rank);
  if (status == nullptr) status = api.dims(shape, found.dims.data(), rank);
  api.free_shape(shape);
  check(api, status);
  static const char nothing = 0;  // an empty tensor is there all the same
  found.data = data != nullptr ? data : &nothing;
  return found;
}

Tensor input(const Api& api, const OrtKernelContext* context, size_t index) {
  const OrtValue* value = nullptr;
  check(api, api.input(context, index, &value));
  return read(api, value);
}

float* output(const Api& api, OrtKernelContext* context, size_t index, const std::vector<int64_t>& dims) {
  OrtValue* value = nullptr;
  check(api, api.output(context, index, dims.data(), dims.size(), &value));
  if (value == nullptr) return nullptr;
  void* data = nullptr;
  check(api, api.data(value, &data));
  return static_cast<float*>(data);
}

template <typename T>
T attribute(const Api& api, const OrtKernelInfo* info, const char* name) {
  T value{};
  if (OrtStatus* status = api.attribute(info, name, &value)) {
    api.free_status(status);
    throw std::runtime_error(std::string("the attribute ") + name + " is missing or of another type");
  }
  return value;
}

int integer(const Api& api, const OrtKernelInfo* info, const char* name) {
  const auto value = attribute<int64_t>(api, info, name);
  if (value < 0 || value > INT32_MAX) throw std::runtime_error(std::string("the attribute ") + name + " is out of range");
  return static_cast<int>(value);
}

float real(const Api& api, const OrtKernelInfo* info, const char* name) { return attribute<float>(api, info, name); }

// Memory of the calling thread that grows and stays.
template <typename T>
T* scratch(std::vector<T>& memory, size_t count) {
  if (memory.size() < count) memory.resize(count);
  return memory.data();
}

// function(i) for all i below `total`, on the session's threads. The only exception it may throw is that there is no
// memory; it must not reach ONNX Runtime's threads, which would end the process.
template <typename Function>
void parallel(const Api& api, const OrtKernelContext* context, size_t total, const Function& function) {
  if (total == 1) return function(0);
  struct Call {
    const Function& function;
    std::atomic<bool> failed{false};
  } call{function};
  const auto run = [](void* data, size_t index) {
    auto* each = static_cast<Call*>(data);
    try {
      each->function(index);
    } catch (const std::bad_alloc&) {
      each->failed = true;
    }
  };
  check(api, api.parallel(context, run, total, &call));
  if (call.failed) throw std::bad_alloc();
}

class QuantizedProduct {
 public:
  static constexpr const char* kName = "QuantizedProduct";
  static constexpr ElementType kInputs[] = {kFloat, kUint8, kFloat, kUint8, kFloat, kFloat};
  static constexpr Presence kInputPresence[] = {kRequired, kRequired, kRequired, kOptional, kOptional, kOptional};
  static constexpr Presence kOutputPresence[] = {kRequired, kOptional};

  QuantizedProduct(const Api& api, const OrtKernelInfo* info) : api_(api) {
    const int outputs = integer(api, info, "N"), width = integer(api, info, "K");
    const int bits = integer(api, info, "bits"), block = integer(api, info, "block_size");
    const int gate = integer(api, info, "gate");
    epsilon_ = real(api, info, "epsilon");
    expect(bits == 4 || bits == 8, "bits must be 4 or 8");
    expect(outputs > 0 && outputs <= kLargestSize && width > 0 && width <= kLargestSize, "N and K must be 1 to 2^27");
    expect(block >= 16 && block % 16 == 0 && block <= kLargestBlock,
           "block_size must be a multiple of 16, at most 65536");
    expect(gate <= kGeluTanh && (gate == kNoGate || outputs % (2 * kLanes) == 0),
           "a gate needs a multiple of 32 outputs");
    gate_ = static_cast<Gate>(gate);
    width_ = width;
    const int64_t blocks = (static_cast<int64_t>(width) + block - 1) / block;
    const Tensor codes = constant(info, 1), scales = constant(info, 2), zeros = constant(info, 3);
    expect(codes && scales, "codes and scales must be constants");
    expect(codes.count() == outputs * blocks * block * bits / 8, "codes have another size than N, K and block_size say");
    expect(scales.count() == outputs * blocks, "scales have another size than N, K and block_size say");
    expect(!zeros || zeros.count() == outputs * ((blocks * bits + 7) / 8),
           "zero points have another size than N, K and block_size say");
    const auto* zero_codes = zeros ? static_cast<const uint8_t*>(zeros.data) : nullptr;
    matrix_ = std::make_unique<PackedMatrix>(static_cast<const uint8_t*>(codes.data), scales.floats(), zero_codes,
                                             outputs, width, block, bits, gate_ != kNoGate);
  }

  const Api& api() const { return api_; }

  void compute(OrtKernelContext* context) {
    const Matrix& matrix = matrix_->view();
    const OrtValue* zeros = nullptr;
    check(api_, api_.input(context, 3, &zeros));
    expect(zeros == nullptr || matrix.zeros != nullptr, "zero points must be constants");
    const Tensor x = input(api_, context, 0), gamma = input(api_, context, 4), skip = input(api_, context, 5);
    expect(!x.dims.empty() && x.dims.back() == width_, "x has another width than the matrix");
    expect(!gamma || gamma.count() == width_, "the norm has another width than the matrix");
    expect(!skip || skip.dims == x.dims, "x and skip differ in shape");
    const int64_t rows = x.count() / width_;
    expect(rows <= INT32_MAX, "x has too many rows");
    const int64_t columns = gate_ == kNoGate ? matrix.outputs : matrix.outputs / 2;
    std::vector<int64_t> dims = x.dims;
    dims.back() = columns;
    float* y = output(api_, context, 0, dims);
    float* sum = output(api_, context, 1, x.dims);
    if (rows == 0) return;
    thread_local std::vector<int8_t> codes;
    thread_local std::vector<float> scales;
    thread_local std::vector<int32_t> sums;
    auto* row_codes = scratch(codes, static_cast<size_t>(rows * matrix.width + 64));
    auto* row_scales = scratch(scales, static_cast<size_t>(rows * matrix.blocks));
    auto* row_sums = scratch(sums, static_cast<size_t>(rows * matrix.blocks));
    const auto prepare = [&](size_t index) {
      thread_local std::vector<float> normed;
      const auto row = static_cast<int64_t>(index);
      const float* from = x.floats() + row * width_;
      if (gamma || skip || sum != nullptr) {
        float* to = scratch(normed, static_cast<size_t>(width_));
        float* kept = sum != nullptr ? sum + row * width_ : to;
        kernels().norm(from, skip ? skip.floats() + row * width_ : nullptr, gamma ? gamma.floats() : nullptr, epsilon_,
                       width_, kept, to);
        from = gamma ? to : kept;
      }
      kernels().quantize(from, width_, matrix.block, matrix.blocks, row_codes + row * matrix.width,
                         row_scales + row * matrix.blocks, row_sums + row * matrix.blocks);
    };
    if (rows * width_ < kSerialValues)
      for (int64_t row = 0; row < rows; ++row) prepare(static_cast<size_t>(row));
    else
      parallel(api_, context, static_cast<size_t>(rows), prepare);
    const Rows packed{row_codes, row_scales, row_sums};
    // Pieces are small, so that threads end together, and even: a gate and its value are neighbours.
    const int piece = 4;
    const double work = static_cast<double>(rows) * matrix.outputs * matrix.width;
    const size_t pieces = work < kSerialWork ? 1 : static_cast<size_t>((matrix.panels + piece - 1) / piece);
    parallel(api_, context, pieces, [&](size_t index) {
      const int first = pieces == 1 ? 0 : static_cast<int>(index) * piece;
      const int count = pieces == 1 ? matrix.panels : std::min(piece, matrix.panels - first);
      kernels().product(matrix, packed, static_cast<int>(rows), first, count, gate_, y, columns);
    });
  }

 private:
  Tensor constant(const OrtKernelInfo* info, size_t index) const {
    int is_constant = 0;
    const OrtValue* value = nullptr;
    if (OrtStatus* status = api_.constant(info, index, &is_constant, &value)) {
      api_.free_status(status);
      return {};
    }
    return is_constant != 0 ? read(api_, value) : Tensor{};
  }

  Api api_;
  Gate gate_ = kNoGate;
  int width_ = 0;
  float epsilon_ = 0;
  std::unique_ptr<PackedMatrix> matrix_;
};

class TreeAttention {
 public:
  static constexpr const char* kName = "TreeAttention";
  static constexpr ElementType kInputs[] = {kFloat, kFloat, kFloat, kFloat, kFloat, kFloat,
                                            kFloat, kInt64, kInt64, kBool,  kFloat, kFloat};
  static constexpr Presence kInputPresence[] = {kRequired, kOptional, kOptional, kRequired, kRequired, kOptional,
                                                kOptional, kRequired, kRequired, kRequired, kOptional, kOptional};
  static constexpr Presence kOutputPresence[] = {kRequired, kRequired, kRequired};

  TreeAttention(const Api& api, const OrtKernelInfo* info) : api_(api) {
    heads_ = integer(api, info, "num_heads");
    kv_heads_ = integer(api, info, "kv_num_heads");
    window_ = integer(api, info, "window");
    scale_ = real(api, info, "scale");
    epsilon_ = real(api, info, "epsilon");
    expect(kv_heads_ > 0 && heads_ > 0 && heads_ % kv_heads_ == 0, "num_heads must be a multiple of kv_num_heads");
  }

  const Api& api() const { return api_; }

  void compute(OrtKernelContext* context) {
    Tensor in[12];
    for (size_t i = 0; i < 12; ++i) in[i] = input(api_, context, i);
    const Tensor &query = in[0], &key = in[1], &value = in[2], &past_k = in[3], &past_v = in[4], &cosine = in[5],
                 &sine = in[6], &positions = in[7], &past = in[8], &tree = in[9];
    expect(past_k.dims.size() == 4 && past_k.dims[0] == 1 && past_k.dims[1] == kv_heads_ && past_k.dims == past_v.dims,
           "caches must be [1, kv_num_heads, slots, width]");
    const int64_t slots = past_k.dims[2], width = past_k.dims[3], nodes = positions.count();
    expect(width > 0 && width <= 1024, "heads must have 1 to 1024 values");
    expect(slots <= INT32_MAX && nodes <= INT32_MAX, "caches or calls have too many rows");
    const bool packed = !key;
    const int64_t all = packed ? heads_ + 2 * kv_heads_ : heads_;
    expect(query.count() == nodes * all * width, "query has another size than positions and heads say");
    expect(packed == !value, "key and value come together");
    expect(packed || (key.count() == nodes * kv_heads_ * width && value.count() == key.count()),
           "key and value have another size than positions and heads say");
    expect(tree.count() == nodes * nodes && past.count() == 1, "tree must be [1, T, T] and past [1]");
    Attention call{};
    call.nodes = static_cast<int>(nodes);
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
    call.positions = static_cast<const int64_t*>(positions.data);
    call.past = *static_cast<const int64_t*>(past.data);
    call.tree = static_cast<const uint8_t*>(tree.data);
    expect(call.past >= 0 && call.past <= slots - nodes, "the call does not fit the cache");
    for (int64_t t = 0; t < nodes; ++t) {
      expect(call.positions[t] >= 0, "a position is negative");
      expect(call.tree[t * nodes + t] != 0, "a node does not see itself");
    }
    expect(!cosine == !sine, "cosines and sines come together");
    if (cosine) {
      expect(cosine.dims.size() == 2 && cosine.dims == sine.dims && 2 * cosine.dims[1] <= width,
             "rotation tables must be [positions, pairs]");
      for (int64_t t = 0; t < nodes; ++t)
        expect(call.positions[t] < cosine.dims[0], "a position is beyond the rotation tables");
      call.rotated = static_cast<int>(cosine.dims[1]);
      call.cosine = cosine.floats();
      call.sine = sine.floats();
    }
    call.output = output(api_, context, 0, {1, nodes, heads_ * width});
    call.cache_k = present(context, 1, past_k);
    call.cache_v = present(context, 2, past_v);
    if (nodes == 0) return;
    thread_local std::vector<float> turned;
    thread_local std::vector<int32_t> lists;
    call.turned = scratch(turned, static_cast<size_t>(heads_ * nodes * width));
    call.lists = scratch(lists, static_cast<size_t>(nodes * nodes + nodes));
    call.counts = call.lists + nodes * nodes;
    kernels().prepare(call);
    const int rows = heads_ / kv_heads_ * call.nodes;
    // As many rows a unit as leave eight units, so that threads end together.
    const int unit = std::max(1, std::min({kMaxRows, rows, rows * kv_heads_ / 8}));
    const int units = (rows + unit - 1) / unit;
    parallel(api_, context, static_cast<size_t>(units) * kv_heads_, [&](size_t index) {
      thread_local std::vector<float> weights;
      const int kv_head = static_cast<int>(index) / units, first = static_cast<int>(index) % units * unit;
      const int count = std::min(unit, rows - first);
      float* memory = scratch(weights, static_cast<size_t>(count) * static_cast<size_t>(slots + nodes + 16));
      kernels().attend(call, kv_head, first, count, memory);
    });
  }

 private:
  static const float* norm(const Tensor& gamma, int64_t width) {
    expect(!gamma || gamma.count() == width, "a norm of heads has another width than they");
    return gamma ? gamma.floats() : nullptr;
  }

  float* present(OrtKernelContext* context, size_t index, const Tensor& past) const {
    float* cache = output(api_, context, index, past.dims);
    expect(cache != nullptr, "both caches must be outputs");
    if (cache != past.data) std::memcpy(cache, past.data, sizeof(float) * static_cast<size_t>(past.count()));
    return cache;
  }

  Api api_;
  int heads_ = 0, kv_heads_ = 0, window_ = 0;
  float scale_ = 0, epsilon_ = 0;
};

// What went wrong, for ONNX Runtime. Nothing is allocated, as memory may be what is missing.
template <typename Kernel>
OrtStatus* failure(const Api& api, const std::exception& error) {
  char text[256];
  std::snprintf(text, sizeof text, "%s: %s", Kernel::kName, error.what());
  return api.error(text);
}

// An operator's description for ONNX Runtime.
template <typename Kernel>
const OrtCustomOp* describe() {
  static const OrtCustomOp description = [] {
    OrtCustomOp op{};
    op.version = kApiVersion;
    op.name = [](const OrtCustomOp*) { return Kernel::kName; };
    op.provider = [](const OrtCustomOp*) -> const char* { return nullptr; };
    op.input_type = [](const OrtCustomOp*, size_t index) { return Kernel::kInputs[index]; };
    op.input_count = [](const OrtCustomOp*) { return std::size(Kernel::kInputs); };
    op.output_type = [](const OrtCustomOp*, size_t) { return kFloat; };
    op.output_count = [](const OrtCustomOp*) { return std::size(Kernel::kOutputPresence); };
    op.input_presence = [](const OrtCustomOp*, size_t index) { return Kernel::kInputPresence[index]; };
    op.output_presence = [](const OrtCustomOp*, size_t index) { return Kernel::kOutputPresence[index]; };
    op.input_memory = [](const OrtCustomOp*, size_t) { return 0; };
    op.variadic_input_least = op.variadic_output_least = [](const OrtCustomOp*) { return 1; };
    op.variadic_input_alike = op.variadic_output_alike = [](const OrtCustomOp*) { return 1; };
    op.first_version = [](const OrtCustomOp*) { return 1; };
    op.last_version = [](const OrtCustomOp*) { return INT32_MAX; };
    op.create = [](const OrtCustomOp*, const OrtApi* table, const OrtKernelInfo* info, void** kernel) -> OrtStatus* {
      const Api api(table);
      try {
        *kernel = new Kernel(api, info);
        return nullptr;
      } catch (const std::exception& error) {
        return failure<Kernel>(api, error);
      }
    };
    op.compute = [](void* kernel, OrtKernelContext* context) -> OrtStatus* {
      try {
        static_cast<Kernel*>(kernel)->compute(context);
        return nullptr;
      } catch (const std::exception& error) {
        return failure<Kernel>(static_cast<Kernel*>(kernel)->api(), error);
      }
    };
    op.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    return op;
  }();
  return &description;
}

// The domain with its operators, null where there is no memory for it.
OrtCustomOpDomain* make_domain(const Api& api) {
  OrtCustomOpDomain* made = nullptr;
  OrtStatus* status = api.make_domain("specexport", &made);
  if (status == nullptr) status = api.add_op(made, describe<QuantizedProduct>());
  if (status == nullptr) status = api.add_op(made, describe<TreeAttention>());
  if (status == nullptr) return made;
  api.free_status(status);
  return nullptr;
}

}  // namespace
}  // namespace specexport

// What ONNX Runtime calls for `SessionOptions.register_custom_ops_library`.
extern "C" __attribute__((visibility("default"))) specexport::OrtStatus* RegisterCustomOps(
    specexport::OrtSessionOptions* options, const specexport::OrtApiBase* base) {
  using namespace specexport;
  const OrtApi* table = base->get(kApiVersion);
  if (table == nullptr) return nullptr;  // older than 1.17: its graphs with these operators will not load
  const Api api(table);
  static OrtCustomOpDomain* const domain = make_domain(api);  // once, also where threads open sessions together
  if (domain == nullptr) return api.error("specexport's operators could not be made");
  return api.add_domain(options, domain);
}
