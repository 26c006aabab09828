// specexport::TreeAttention as an IPluginV3 (TensorRT 10.3 or later, TensorRT-RTX), in a library of its own.
//
// Inputs and outputs are those of engines/plugins/tree_attention/__init__.py, in its order. Load the library with
// IPluginRegistry::loadLibrary, or let a plan carry it (IBuilderConfig::setPluginsToSerialize).
#include <NvInferRuntime.h>

#include <cstring>
#include <new>

#include "../tree_attention.h"

namespace {

using namespace nvinfer1;

constexpr char kName[] = "TreeAttention", kVersion[] = "1", kNamespace[] = "";
enum Input : int32_t {
    kQuery, kKey, kValue, kPastK, kPastV, kTree, kPositions, kPast, kWrite, kCommit, kOrder, kInputs
};
enum Output : int32_t { kMixed, kPresentK, kPresentV, kOutputs };

// The input that an output shares its memory with, or -1.
int32_t aliased(int32_t output) { return output == kPresentK ? kPastK : output == kPresentV ? kPastV : -1; }

int32_t size(Dims const& dims, int32_t axis) { return static_cast<int32_t>(dims.d[axis]); }

class TreeAttention final : public IPluginV3,
                            public IPluginV3OneCore,
                            public IPluginV3OneBuildV2,
                            public IPluginV3OneRuntime {
  public:
    TreeAttention(float scale, int32_t window) : scale_(scale), window_(window) {}

    IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
        switch (type) {
            case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
            case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuildV2*>(this);
            case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
        }
        return nullptr;
    }
    IPluginV3* clone() noexcept override { return new (std::nothrow) TreeAttention(scale_, window_); }

    char const* getPluginName() const noexcept override { return kName; }
    char const* getPluginVersion() const noexcept override { return kVersion; }
    char const* getPluginNamespace() const noexcept override { return kNamespace; }

    int32_t getNbOutputs() const noexcept override { return kOutputs; }
    int32_t getAliasedInput(int32_t output) noexcept override { return aliased(output); }

    int32_t getOutputDataTypes(DataType* outputs, int32_t count, DataType const* inputs,
                               int32_t given) const noexcept override {
        if (count != kOutputs || given != kInputs) return -1;
        for (int32_t i = 0; i < kOutputs; ++i) outputs[i] = inputs[kQuery];
        return 0;
    }

    int32_t getOutputShapes(DimsExprs const* inputs, int32_t given, DimsExprs const*, int32_t, DimsExprs* outputs,
                            int32_t count, IExprBuilder&) noexcept override {
        if (count != kOutputs || given != kInputs) return -1;
        for (int32_t i = 0; i < kOutputs; ++i) outputs[i] = inputs[i == kMixed ? int32_t{kQuery} : aliased(i)];
        return 0;
    }

    bool supportsFormatCombination(int32_t place, DynamicPluginTensorDesc const* tensors, int32_t given,
                                   int32_t) noexcept override {
        if (given != kInputs) return false;
        PluginTensorDesc const& tensor = tensors[place].desc;
        if (tensor.format != TensorFormat::kLINEAR) return false;
        if (place == kQuery) return tensor.type == DataType::kHALF || tensor.type == DataType::kBF16;
        bool const element = place < kTree || place >= kInputs;
        return tensor.type == (element ? tensors[kQuery].desc.type : DataType::kINT32);
    }

    // Refuses at build time what the kernels would refuse at run time.
    int32_t configurePlugin(DynamicPluginTensorDesc const* inputs, int32_t given, DynamicPluginTensorDesc const*,
                            int32_t) noexcept override {
        size_t bytes = 0;
        return given == kInputs ? workspace(largest(inputs), &bytes) : -1;
    }

    size_t getWorkspaceSize(DynamicPluginTensorDesc const* inputs, int32_t, DynamicPluginTensorDesc const*,
                            int32_t) const noexcept override {
        size_t bytes = 0;
        workspace(largest(inputs), &bytes);
        return bytes;
    }

    int32_t onShapeChange(PluginTensorDesc const* inputs, int32_t given, PluginTensorDesc const*,
                          int32_t) noexcept override {
        size_t bytes = 0;
        return given == kInputs ? workspace(sizes(inputs[kQuery], inputs[kPastK], inputs[kCommit]), &bytes) : -1;
    }

    int32_t enqueue(PluginTensorDesc const* descs, PluginTensorDesc const*, void const* const* inputs,
                    void* const* outputs, void* workspace_memory, cudaStream_t stream) noexcept override {
        // Without aliasing the caches would have to be copied, which is what the operator is there to avoid.
        if (outputs[kPresentK] != inputs[kPastK] || outputs[kPresentV] != inputs[kPastV]) return -1;
        SpecexportTreeAttention call = sizes(descs[kQuery], descs[kPastK], descs[kCommit]);
        call.query = inputs[kQuery];
        call.key = inputs[kKey];
        call.value = inputs[kValue];
        call.cache_k = outputs[kPresentK];
        call.cache_v = outputs[kPresentV];
        call.tree = static_cast<uint32_t const*>(inputs[kTree]);
        call.positions = static_cast<int32_t const*>(inputs[kPositions]);
        call.past = static_cast<int32_t const*>(inputs[kPast]);
        call.write = static_cast<int32_t const*>(inputs[kWrite]);
        call.commit = static_cast<int32_t const*>(inputs[kCommit]);
        call.order = static_cast<int32_t const*>(inputs[kOrder]);
        call.output = outputs[kMixed];
        call.workspace = workspace_memory;
        if (int32_t const error = workspace(call, &call.workspace_bytes)) return error;
        return tree_attention_enqueue(&call, stream);
    }

    IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return clone(); }

    PluginFieldCollection const* getFieldsToSerialize() noexcept override {
        fields_[0] = {"scale", &scale_, PluginFieldType::kFLOAT32, 1};
        fields_[1] = {"window", &window_, PluginFieldType::kINT32, 1};
        collection_ = {2, fields_};
        return &collection_;
    }

  private:
    SpecexportTreeAttention sizes(PluginTensorDesc const& query, PluginTensorDesc const& cache,
                                  PluginTensorDesc const& commit) const {
        return sizes(query.dims, cache.dims, commit.dims, query.type);
    }
    SpecexportTreeAttention largest(DynamicPluginTensorDesc const* inputs) const {
        return sizes(inputs[kQuery].max, inputs[kPastK].max, inputs[kCommit].max, inputs[kQuery].desc.type);
    }
    SpecexportTreeAttention sizes(Dims const& query, Dims const& cache, Dims const& commit, DataType type) const {
        SpecexportTreeAttention call = {};
        call.nodes = size(query, 2);
        call.heads = size(query, 1);
        call.kv_heads = size(cache, 1);
        call.head_dim = size(query, 3);
        call.slots = size(cache, 2);
        call.committed = size(commit, 0);
        call.window = window_;
        call.element = type == DataType::kBF16 ? SPECEXPORT_BF16 : SPECEXPORT_FP16;
        call.cache = SPECEXPORT_CACHE_ELEMENTS;
        call.scale = scale_;
        return call;
    }
    static int32_t workspace(SpecexportTreeAttention const& call, size_t* bytes) {
        return tree_attention_workspace(&call, bytes);
    }

    float scale_;
    int32_t window_;
    PluginField fields_[2];
    PluginFieldCollection collection_;
};

// An attribute of the ONNX node; the parser hands integers over in 32 or 64 bits.
bool read(PluginField const& field, float& scale, int32_t& window) {
    if (!field.data || field.length != 1) return false;
    if (!std::strcmp(field.name, "scale") && field.type == PluginFieldType::kFLOAT32)
        scale = *static_cast<float const*>(field.data);
    else if (!std::strcmp(field.name, "window") && field.type == PluginFieldType::kINT32)
        window = *static_cast<int32_t const*>(field.data);
    else if (!std::strcmp(field.name, "window") && field.type == PluginFieldType::kINT64)
        window = static_cast<int32_t>(*static_cast<int64_t const*>(field.data));
    else
        return false;
    return true;
}

class Creator final : public IPluginCreatorV3One {
  public:
    IPluginV3* createPlugin(char const*, PluginFieldCollection const* fields, TensorRTPhase) noexcept override {
        float scale = 0;
        int32_t window = 0, known = 0;
        for (int32_t i = 0; fields && i < fields->nbFields; ++i) known += read(fields->fields[i], scale, window);
        return known == 2 ? new (std::nothrow) TreeAttention(scale, window) : nullptr;
    }
    PluginFieldCollection const* getFieldNames() noexcept override { return &names_; }
    char const* getPluginName() const noexcept override { return kName; }
    char const* getPluginVersion() const noexcept override { return kVersion; }
    char const* getPluginNamespace() const noexcept override { return kNamespace; }

  private:
    PluginField fields_[2] = {{"scale", nullptr, PluginFieldType::kFLOAT32, 1},
                              {"window", nullptr, PluginFieldType::kINT32, 1}};
    PluginFieldCollection names_ = {2, fields_};
};

}  // namespace

#define SPECEXPORT_EXPORT extern "C" __attribute__((visibility("default")))

// What TensorRT looks for in a plugin library.
SPECEXPORT_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    static Creator creator;
    static nvinfer1::IPluginCreatorInterface* const creators[] = {&creator};
    count = 1;
    return creators;
}

SPECEXPORT_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder*) {}
