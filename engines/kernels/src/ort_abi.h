// What of ONNX Runtime's C interface the operators use, declared here because its headers come with no Python package.
//
// ONNX Runtime promises that functions keep their place in its table and that structures only grow at the end, so a
// place is as good as a name. Version 17 has all of them (KernelContext_ParallelFor is the youngest).
#pragma once

#include <cstddef>
#include <cstdint>

namespace specexport {

constexpr uint32_t kApiVersion = 17;

struct OrtStatus;
struct OrtValue;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtShape;

struct OrtApi;  // a table of functions; see `Api`

struct OrtApiBase {
  const OrtApi*(*get)(uint32_t version);
  const char*(*version)();
};

enum ElementType { kUndefined = 0, kFloat = 1, kUint8 = 2, kInt8 = 3, kInt64 = 7, kBool = 9 };
enum Presence { kRequired = 0, kOptional = 1 };

// ONNX Runtime's OrtCustomOp; what is null is not used.
struct OrtCustomOp {
  uint32_t version;
  void*(*create_old)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char*(*name)(const OrtCustomOp*);
  const char*(*provider)(const OrtCustomOp*);
  ElementType(*input_type)(const OrtCustomOp*, size_t);
  size_t(*input_count)(const OrtCustomOp*);
  ElementType(*output_type)(const OrtCustomOp*, size_t);
  size_t(*output_count)(const OrtCustomOp*);
  void(*compute_old)(void*, OrtKernelContext*);
  void(*destroy)(void*);
  Presence(*input_presence)(const OrtCustomOp*, size_t);
  Presence(*output_presence)(const OrtCustomOp*, size_t);
  int(*input_memory)(const OrtCustomOp*, size_t);
  int(*variadic_input_least)(const OrtCustomOp*);
  int(*variadic_input_alike)(const OrtCustomOp*);
  int(*variadic_output_least)(const OrtCustomOp*);
  int(*variadic_output_alike)(const OrtCustomOp*);
  OrtStatus*(*create)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void** kernel);
  OrtStatus*(*compute)(void* kernel, OrtKernelContext*);
  OrtStatus*(*infer_shape)(const OrtCustomOp*, void*);
  int(*first_version)(const OrtCustomOp*);
  int(*last_version)(const OrtCustomOp*);
  size_t(*may_inplace)(int**, int**);
  void(*free_may_inplace)(int*, int*);
  size_t(*aliases)(int**, int**);
  void(*free_aliases)(int*, int*);
};

// Typed calls into the table.
class Api {
 public:
  Api() = default;
  explicit Api(const OrtApi* table) : table_(table) {}

  OrtStatus* error(const char* text) const { return at<OrtStatus*(*)(int, const char*)>(0)(2, text); }  // 2: invalid argument
  OrtStatus* make_domain(const char* name, OrtCustomOpDomain** out) const {
    return at<OrtStatus*(*)(const char*, OrtCustomOpDomain**)>(26)(name, out);
  }
  OrtStatus* add_op(OrtCustomOpDomain* domain, const OrtCustomOp* op) const {
    return at<OrtStatus*(*)(OrtCustomOpDomain*, const OrtCustomOp*)>(27)(domain, op);
  }
  OrtStatus* add_domain(OrtSessionOptions* options, OrtCustomOpDomain* domain) const {
    return at<OrtStatus*(*)(OrtSessionOptions*, OrtCustomOpDomain*)>(28)(options, domain);
  }
  OrtStatus* data(OrtValue* value, void** out) const { return at<OrtStatus*(*)(OrtValue*, void**)>(51)(value, out); }
  OrtStatus* dim_count(const OrtShape* shape, size_t* out) const {
    return at<OrtStatus*(*)(const OrtShape*, size_t*)>(61)(shape, out);
  }
  OrtStatus* dims(const OrtShape* shape, int64_t* out, size_t count) const {
    return at<OrtStatus*(*)(const OrtShape*, int64_t*, size_t)>(62)(shape, out, count);
  }
  OrtStatus* shape(const OrtValue* value, OrtShape** out) const {
    return at<OrtStatus*(*)(const OrtValue*, OrtShape**)>(65)(value, out);
  }
  OrtStatus* attribute(const OrtKernelInfo* info, const char* name, float* out) const {
    return at<OrtStatus*(*)(const OrtKernelInfo*, const char*, float*)>(85)(info, name, out);
  }
  OrtStatus* attribute(const OrtKernelInfo* info, const char* name, int64_t* out) const {
    return at<OrtStatus*(*)(const OrtKernelInfo*, const char*, int64_t*)>(86)(info, name, out);
  }
  OrtStatus* input(const OrtKernelContext* context, size_t index, const OrtValue** out) const {
    return at<OrtStatus*(*)(const OrtKernelContext*, size_t, const OrtValue**)>(90)(context, index, out);
  }
  OrtStatus* output(OrtKernelContext* context, size_t index, const int64_t* dims, size_t count, OrtValue** out) const {
    return at<OrtStatus*(*)(OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**)>(91)(context, index, dims,
                                                                                               count, out);
  }
  void free_status(OrtStatus* status) const { at<void(*)(OrtStatus*)>(93)(status); }
  void free_shape(OrtShape* shape) const { at<void(*)(OrtShape*)>(99)(shape); }
  OrtStatus* constant(const OrtKernelInfo* info, size_t index, int* is_constant, const OrtValue** out) const {
    return at<OrtStatus*(*)(const OrtKernelInfo*, size_t, int*, const OrtValue**)>(249)(info, index, is_constant, out);
  }
  // fn(data, i) for all i below `total`, on the session's threads.
  OrtStatus* parallel(const OrtKernelContext* context, void (*fn)(void*, size_t), size_t total, void* data) const {
    using Function = OrtStatus*(*)(const OrtKernelContext*, void (*)(void*, size_t), size_t, size_t, void*);
    return at<Function>(274)(context, fn, total, 0, data);
  }

 private:
  template <typename Function>
  Function at(size_t place) const {
    return reinterpret_cast<Function>(reinterpret_cast<void* const*>(table_)[place]);
  }

  const OrtApi* table_ = nullptr;
};

}  // namespace specexport
