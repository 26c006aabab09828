// What the operators share: tensors and attributes of a call, and its threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "ort_abi.h"

namespace specexport {

inline void check(const Api& api, OrtStatus* status) {
  if (status == nullptr) return;
  api.free_status(status);
  throw std::runtime_error("onnxruntime refused a call");
}

inline void expect(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

struct Tensor {
  const void* data = nullptr;
  std::vector<int64_t> dims;

  explicit operator bool() const { return data != nullptr; }
  template <typename T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
  const float* floats() const { return as<float>(); }
  int64_t count() const {
    int64_t all = 1;
    for (int64_t dim : dims) all *= dim;
    return all;
  }
};

inline Tensor read(const Api& api, const OrtValue* value) {
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

inline Tensor input(const Api& api, const OrtKernelContext* context, size_t index) {
  const OrtValue* value = nullptr;
  check(api, api.input(context, index, &value));
  return read(api, value);
}

template <typename T>
T* output(const Api& api, OrtKernelContext* context, size_t index, const std::vector<int64_t>& dims) {
  OrtValue* value = nullptr;
  check(api, api.output(context, index, dims.data(), dims.size(), &value));
  if (value == nullptr) return nullptr;
  void* data = nullptr;
  check(api, api.data(value, &data));
  return static_cast<T*>(data);
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

inline int integer(const Api& api, const OrtKernelInfo* info, const char* name) {
  const auto value = attribute<int64_t>(api, info, name);
  if (value < 0 || value > INT32_MAX) throw std::runtime_error(std::string("the attribute ") + name + " is out of range");
  return static_cast<int>(value);
}

inline float real(const Api& api, const OrtKernelInfo* info, const char* name) { return attribute<float>(api, info, name); }

// Memory of the calling thread that grows and stays.
template <typename T>
T* scratch(std::vector<T>& memory, size_t count) {
  if (memory.size() < count) memory.resize(count);
  return memory.data();
}

// The session's threads, during a call.
class Threads {
 public:
  Threads(const Api& api, const OrtKernelContext* context) : api_(api), context_(context) {}

  // function(i) for all i below `total`. The only exception it may throw is that there is no memory; it must not reach
  // ONNX Runtime's threads, which would end the process.
  template <typename Function>
  void each(size_t total, const Function& function) const {
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
    check(api_, api_.parallel(context_, run, total, &call));
    if (call.failed) throw std::bad_alloc();
  }

 private:
  const Api& api_;
  const OrtKernelContext* context_;
};

// The tensor of an input that is a constant; nothing if it is none.
inline Tensor constant(const Api& api, const OrtKernelInfo* info, size_t index) {
  int is_constant = 0;
  const OrtValue* value = nullptr;
  if (OrtStatus* status = api.constant(info, index, &is_constant, &value)) {
    api.free_status(status);
    return {};
  }
  return is_constant != 0 ? read(api, value) : Tensor{};
}

}  // namespace specexport
