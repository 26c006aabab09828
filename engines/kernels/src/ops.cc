// The operators of domain "specexport" for ONNX Runtime's CPU provider, which their headers describe.
#include <cstdio>
#include <exception>
#include <iterator>

#include "attention_op.h"
#include "grow_op.h"
#include "product_op.h"

namespace specexport {
namespace {

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
    op.output_type = [](const OrtCustomOp*, size_t index) { return Kernel::kOutputs[index]; };
    op.output_count = [](const OrtCustomOp*) { return std::size(Kernel::kOutputs); };
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
  if (status == nullptr) status = api.add_op(made, describe<GrowTree>());
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
