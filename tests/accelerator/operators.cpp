// Operators. All but a few run by one fallback: their kernels for meta tensors say which results there are, and a task
// of the current stream calls their kernels for the CPU.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/SparseTensorUtils.h>
#include <torch/library.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "generator.h"
#include "runtime.h"

namespace simulated {
namespace {

using c10::IValue;
using torch::jit::Stack;

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

bool isSimulated(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDeviceType; }

// A tensor of another device with the geometry of `tensor`, on `storage`.
at::Tensor tensorLike(const at::Tensor& tensor, const c10::Storage& storage, c10::DispatchKeySet keys) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  result._set_conj(tensor.is_conj());
  result._set_neg(tensor.is_neg());
  return result;
}

// Tensors that stand for others on the meta device or on the CPU. Tensors that share a storage have mirrors that do.
class Mirrors {
 public:
  explicit Mirrors(c10::DeviceType type) : type_(type) {}

  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        tensor.layout() == at::kStrided, "simulated kernels take no tensors with the layout ", tensor.layout());
    auto& mirror = tensors_[tensor.unsafeGetTensorImpl()];
    if (!mirror.defined()) {
      const bool is_cpu = type_ == c10::DeviceType::CPU;
      mirror = tensorLike(
          tensor, storageOf(tensor.storage()),
          c10::DispatchKeySet(is_cpu ? c10::DispatchKey::CPU : c10::DispatchKey::Meta));
      originals_[mirror.unsafeGetTensorImpl()] = tensor;
    }
    return mirror;
  }

  // The tensor whose mirror this is, or undefined.
  at::Tensor originalOf(const at::Tensor& mirror) const {
    auto it = originals_.find(mirror.unsafeGetTensorImpl());
    return it == originals_.end() ? at::Tensor() : it->second;
  }

  // The storage whose mirror this tensor is a view of.
  std::optional<c10::Storage> originalStorageOf(const at::Tensor& mirror) const {
    auto it = original_storages_.find(mirror.storage().unsafeGetStorageImpl());
    return it == original_storages_.end() ? std::nullopt : std::make_optional(it->second);
  }

  void add(const at::Tensor& mirror, const at::Tensor& original) {
    originals_[mirror.unsafeGetTensorImpl()] = original;
    others_.push_back(mirror);
  }

 private:
  const c10::Storage& storageOf(const c10::Storage& storage) {
    auto it = storages_.find(storage.unsafeGetStorageImpl());
    if (it != storages_.end()) {
      return it->second;
    }
    const bool is_cpu = type_ == c10::DeviceType::CPU;
    void* data = nullptr;
    if (is_cpu) {
      const bool is_on_device = storage.device().type() == kDeviceType;
      data = is_on_device ? memoryForTasks(storage.data()) : const_cast<void*>(storage.data());
    }
    c10::Storage mirror(
        c10::Storage::use_byte_size_t{}, storage.nbytes(), c10::DataPtr(data, c10::Device(type_)),
        is_cpu ? nullptr : c10::GetAllocator(type_), /*resizable=*/!is_cpu);
    original_storages_.emplace(mirror.unsafeGetStorageImpl(), storage);
    return storages_.emplace(storage.unsafeGetStorageImpl(), std::move(mirror)).first->second;
  }

  c10::DeviceType type_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> original_storages_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> tensors_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> originals_;
  std::vector<at::Tensor> others_;
};

template <typename F>
void forEachTensor(const IValue& value, F f) {
  if (value.isTensor()) {
    f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const auto& tensor : value.toTensorVector()) {
      f(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector()) {
      if (tensor) {
        f(*tensor);
      }
    }
  }
}

template <typename F>
IValue mapTensors(const IValue& value, F f) {
  if (value.isTensor()) {
    return f(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& tensor : value.toTensorVector()) {
      list.push_back(f(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::make_optional(f(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

bool hasOnlyTensors(const IValue& value) {
  bool are_strided = value.isTensor() || value.isTensorList();
  forEachTensor(value, [&](const at::Tensor& tensor) {
    are_strided = are_strided && (!tensor.defined() || tensor.layout() == at::kStrided);
  });
  return are_strided;
}

Access accessOf(const at::Tensor& tensor, bool is_write) {
  if (!tensor.defined() || tensor.numel() == 0) {
    return {};
  }
  int64_t elements = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const auto* base = static_cast<const char*>(tensor.storage().data());
  return {base + tensor.storage_offset() * tensor.itemsize(), elements * tensor.itemsize(), is_write};
}

void poison(const at::Tensor& mirror) {
  if (!mirror.defined() || mirror.numel() == 0) {
    return;
  }
  auto bytes = at::empty(mirror.sizes(), mirror.options());
  std::memset(bytes.mutable_data_ptr(), kPoison, bytes.nbytes());
  mirror.copy_(bytes);
}

// What is known about an operator.
struct OperatorTraits {
  bool must_synchronize = false;  // its results depend on data
  bool changes_geometry_only = false;
  std::optional<size_t> generator;  // the argument's index
};

std::mutex traits_mutex;
std::unordered_map<c10::OperatorName, OperatorTraits> traits_by_name;

OperatorTraits traitsOf(const c10::OperatorHandle& op) {
  std::lock_guard lock(traits_mutex);
  auto [it, is_new] = traits_by_name.try_emplace(op.operator_name());
  if (is_new) {
    auto& traits = it->second;
    const auto& schema = op.schema();
    for (const auto& result : schema.returns()) {
      const auto type = result.type()->str();
      traits.must_synchronize |= type != "Tensor" && type != "Tensor[]";
    }
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      if (schema.arguments()[i].type()->str().find("Generator") != std::string::npos) {
        traits.generator = i;
      }
    }
    for (const auto tag : op.getTags()) {
      traits.must_synchronize |= tag == at::Tag::dynamic_output_shape || tag == at::Tag::data_dependent_output;
      traits.changes_geometry_only |= tag == at::Tag::inplace_view;
    }
    traits.must_synchronize &= !schema.returns().empty();
    // The sizes of its further results differ between devices.
    traits.must_synchronize |= schema.name().rfind("aten::_embedding_bag", 0) == 0;
  }
  return it->second;
}

bool isWritten(const c10::FunctionSchema& schema, size_t index) {
  const auto* alias = schema.arguments()[index].alias_info();
  return alias && alias->isWrite();
}

// The device of all simulated tensors among the arguments, or of the factory's argument, or the current one. A real
// accelerator's kernels take scalars and indices from the CPU, and nothing else.
c10::Device checkDevices(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments) {
  std::optional<c10::Device> device;
  for (const auto& argument : arguments) {
    forEachTensor(argument, [&](const at::Tensor& tensor) {
      if (isSimulated(tensor)) {
        TORCH_CHECK(
            !device || *device == tensor.device(),
            "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
            tensor.device(), "! (in ", schema.name(), ")");
        device = tensor.device();
      }
    });
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].isDevice() && !device && arguments[i].toDevice().type() == kDeviceType) {
      device = arguments[i].toDevice();
    }
    forEachTensor(arguments[i], [&](const at::Tensor& tensor) {
      if (tensor.defined() && !isSimulated(tensor)) {
        const bool is_value =
            tensor.is_cpu() && !isWritten(schema, i) && (tensor.dim() == 0 || arguments[i].isOptionalTensorList());
        TORCH_CHECK(
            is_value, "Expected all tensors to be on the same device, but found at least two devices, ",
            device ? *device : c10::Device(kDeviceType, currentDevice()), " and ", tensor.device(), "! (in ",
            schema.name(), ")");
      }
    });
  }
  if (!device || !device->has_index()) {
    device = c10::Device(kDeviceType, currentDevice());
  }
  return *device;
}

// Gives a storage at least `bytes`; a task copies what it holds.
void growStorage(const c10::Storage& storage, size_t bytes) {
  if (bytes <= storage.nbytes()) {
    return;
  }
  TORCH_CHECK(storage.unsafeGetStorageImpl()->resizable(), "Trying to resize storage that is not resizable");
  c10::DeviceGuard guard(storage.device());
  auto memory = allocate(bytes);
  if (storage.nbytes() > 0) {
    copyMemory(memory.get(), storage.data(), storage.nbytes());
  }
  storage.set_data_ptr_noswap(std::move(memory));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

void setGeometry(const at::Tensor& tensor, const at::Tensor& geometry) {
  if (tensor.sizes() == geometry.sizes() && tensor.strides() == geometry.strides() &&
      tensor.storage_offset() == geometry.storage_offset()) {
    return;
  }
  growStorage(
      tensor.storage(),
      at::detail::computeStorageNbytes(
          geometry.sizes(), geometry.strides(), tensor.itemsize(), geometry.storage_offset()));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(geometry.sizes(), geometry.strides(), geometry.storage_offset());
}

at::Tensor emptyStrided(const at::Tensor& geometry, c10::Device device) {
  c10::DeviceGuard guard(device);
  return at::Tensor(at::detail::empty_strided_generic(
      geometry.sizes(), geometry.strides(), c10::GetAllocator(kDeviceType), kKeys, geometry.scalar_type()));
}

// A result that is a view of an argument.
at::Tensor viewOf(const c10::Storage& storage, const at::Tensor& geometry) {
  return tensorLike(geometry, storage, kKeys);
}

// The tensor whose mirror this is, or a view of the storage whose mirror it is a view of, or undefined.
at::Tensor aliasOf(const Mirrors& mirrors, const at::Tensor& mirror) {
  if (auto original = mirrors.originalOf(mirror); original.defined()) {
    return original;
  }
  const auto storage = mirrors.originalStorageOf(mirror);
  return storage ? viewOf(*storage, mirror) : at::Tensor();
}

at::Generator generatorOf(const IValue& argument, c10::Device device) {
  const bool is_given = argument.isGenerator() && argument.toGenerator().device().type() == kDeviceType;
  return generatorForTask(is_given ? argument.toGenerator() : defaultGenerator(device.index()));
}

// The arguments for the kernel of the CPU. Mirrors have no reference to device memory, as a kernel's launch has none.
Stack cpuArguments(
    const std::vector<IValue>& arguments, const OperatorTraits& traits, c10::Device device, Mirrors& mirrors) {
  Stack result;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (traits.generator == i) {
      result.emplace_back(generatorOf(arguments[i], device));
    } else if (arguments[i].isDevice()) {
      result.emplace_back(c10::Device(c10::kCPU));
    } else {
      result.push_back(mapTensors(arguments[i], [&](const at::Tensor& tensor) {
        // A scalar is an argument by value.
        return !tensor.defined() || isSimulated(tensor) ? mirrors.of(tensor) : tensor.detach().clone();
      }));
    }
  }
  return result;
}

std::vector<Access> accessesOf(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments) {
  std::vector<Access> result;
  for (size_t i = 0; i < arguments.size(); ++i) {
    forEachTensor(arguments[i], [&](const at::Tensor& tensor) {
      if (isSimulated(tensor)) {
        result.push_back(accessOf(tensor, isWritten(schema, i)));
      }
    });
  }
  return result;
}

// Names of tasks live as long as the process.
const char* labelOf(const c10::FunctionSchema& schema) {
  static std::mutex mutex;
  static std::unordered_set<std::string>* const labels = new std::unordered_set<std::string>;
  std::lock_guard lock(mutex);
  return labels->insert(schema.name()).first->c_str();
}

// Calls the operator with meta tensors; returns no results if it has no such kernel, or if it fails, in which case the
// kernel of the CPU says why.
std::optional<Stack> callOnMeta(
    const c10::OperatorHandle& op, const std::vector<IValue>& arguments, const OperatorTraits& traits,
    Mirrors& mirrors) {
  Stack stack;
  try {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (traits.generator == i) {
        stack.emplace_back();
      } else if (arguments[i].isDevice()) {
        stack.emplace_back(c10::Device(c10::kMeta));
      } else {
        stack.push_back(mapTensors(arguments[i], [&](const at::Tensor& tensor) {
          const bool is_scalar = tensor.defined() && tensor.is_cpu() && tensor.dim() == 0;
          return is_scalar ? tensor : mirrors.of(tensor);
        }));
      }
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(&stack);
  } catch (const std::exception& error) {
    if (std::getenv("SIM_LOG_META")) {
      TORCH_WARN("sim: ", op.operator_name(), ": ", c10::str(error.what()).substr(0, 300));
    }
    return std::nullopt;
  }
  if (!std::all_of(stack.begin(), stack.end(), hasOnlyTensors)) {
    return std::nullopt;
  }
  return stack;
}

// Executes the operator in a task and waits for it: for results that are no tensors or whose sizes depend on data.
void callAndWait(
    const c10::OperatorHandle& op, Stack* stack, const std::vector<IValue>& arguments, const OperatorTraits& traits,
    c10::Device device) {
  const auto& schema = op.schema();
  Mirrors mirrors(c10::DeviceType::CPU);
  auto cpu_stack = std::make_shared<Stack>(cpuArguments(arguments, traits, device, mirrors));
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // an argument's mirror and the tensor that takes its place
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (isWritten(schema, i)) {
      (*cpu_stack)[i] = mapTensors((*cpu_stack)[i], [&](const at::Tensor& mirror) {
        if (!mirror.defined()) {
          return mirror;
        }
        auto copy = at::empty_strided(mirror.sizes(), mirror.strides(), mirror.options());
        written.emplace_back(mirror, copy);
        return copy;
      });
    }
  }
  auto error = std::make_shared<std::exception_ptr>();
  waitForTask(enqueue(
      currentStream(device.index()), labelOf(schema), accessesOf(schema, arguments),
      [op, cpu_stack, written, error](const auto& is_poisoned) {
        at::AutoDispatchBelowADInplaceOrView guard;
        try {
          for (const auto& [mirror, copy] : written) {
            copy.copy_(mirror);
          }
          op.callBoxed(cpu_stack.get());
          for (auto& result : *cpu_stack) {
            if (is_poisoned && result.isDouble()) {
              result = std::nan("");
            } else if (is_poisoned) {
              forEachTensor(result, [](const at::Tensor& tensor) { poison(tensor); });
            }
          }
          for (const auto& [mirror, copy] : written) {
            if (copy.sizes() == mirror.sizes() && copy.strides() == mirror.strides()) {
              mirror.copy_(copy);
              if (is_poisoned) {
                poison(mirror);
              }
            }
          }
        } catch (...) {
          *error = std::current_exception();
        }
      }));
  if (*error) {
    std::rethrow_exception(*error);
  }
  for (const auto& [mirror, copy] : written) {
    auto original = mirrors.originalOf(mirror);
    mirrors.add(copy, original);
    if (copy.sizes() != mirror.sizes() || copy.strides() != mirror.strides()) {
      setGeometry(original, copy);
      original.copy_(copy);
    }
  }
  torch::jit::drop(*stack, arguments.size());
  for (const auto& result : *cpu_stack) {
    stack->push_back(mapTensors(result, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) {
        return tensor;
      }
      if (auto alias = aliasOf(mirrors, tensor); alias.defined()) {
        return alias;
      }
      auto copy = emptyStrided(tensor, device);
      copy.copy_(tensor);
      return copy;
    }));
  }
}

void call(const c10::OperatorHandle& op, Stack* stack) {
  checkUsable();
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size()).vec();
  const auto traits = traitsOf(op);
  const auto device = checkDevices(schema, arguments);
  c10::DeviceGuard guard(device);
  Mirrors metas(c10::DeviceType::Meta);
  auto meta_results = traits.must_synchronize ? std::nullopt : callOnMeta(op, arguments, traits, metas);
  if (!meta_results) {
    callAndWait(op, stack, arguments, traits, device);
    return;
  }

  Mirrors mirrors(c10::DeviceType::CPU);
  std::vector<at::Tensor> written;  // mirrors
  bool has_work = !traits.changes_geometry_only && schema.returns().empty();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (isWritten(schema, i)) {
      has_work |= !traits.changes_geometry_only;
      forEachTensor(arguments[i], [&](const at::Tensor& tensor) {
        if (isSimulated(tensor)) {
          setGeometry(tensor, metas.of(tensor));
        }
      });
    }
  }
  auto accesses = accessesOf(schema, arguments);
  auto cpu_stack = cpuArguments(arguments, traits, device, mirrors);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (isWritten(schema, i)) {
      forEachTensor(cpu_stack[i], [&](const at::Tensor& mirror) { written.push_back(mirror); });
    }
  }
  Stack results;
  std::vector<std::vector<at::Tensor>>
      fresh;  // for each result, mirrors of its tensors, undefined if they are no new ones
  for (const auto& meta_result : *meta_results) {
    auto& mirrors_of_result = fresh.emplace_back();
    results.push_back(mapTensors(meta_result, [&](const at::Tensor& meta) {
      auto& mirror = mirrors_of_result.emplace_back();
      if (!meta.defined()) {
        return meta;
      }
      if (auto alias = aliasOf(metas, meta); alias.defined()) {
        return alias;
      }
      auto result = emptyStrided(meta, device);
      mirror = mirrors.of(result);
      accesses.push_back(accessOf(result, true));
      has_work = true;
      return result;
    }));
  }
  if (has_work) {
    enqueue(
        currentStream(device.index()), labelOf(schema), std::move(accesses),
        [op, cpu_stack = std::move(cpu_stack), written = std::move(written),
         fresh = std::move(fresh)](const auto& is_poisoned) {
          at::AutoDispatchBelowADInplaceOrView below_autograd;
          std::exception_ptr error;
          try {
            auto results_of_cpu = cpu_stack;
            op.callBoxed(&results_of_cpu);
            for (size_t i = 0; i < fresh.size(); ++i) {
              size_t j = 0;
              forEachTensor(results_of_cpu.at(i), [&](const at::Tensor& result) {
                const auto& mirror = fresh[i].at(j++);
                if (mirror.defined() && result.defined()) {
                  TORCH_CHECK(
                      mirror.sizes() == result.sizes(), op.schema().name(),
                      ": the kernels for meta and CPU disagree about the result's size");
                  mirror.copy_(result);
                }
              });
            }
          } catch (...) {
            error = std::current_exception();
          }
          if (is_poisoned || error) {
            for (const auto& mirror : written) {
              poison(mirror);
            }
            for (const auto& mirrors_of_result : fresh) {
              for (const auto& mirror : mirrors_of_result) {
                poison(mirror);
              }
            }
          }
          if (error) {
            std::rethrow_exception(error);
          }
        });
  }
  torch::jit::drop(*stack, arguments.size());
  for (auto& result : results) {
    stack->push_back(std::move(result));
  }
}

void fallback(const c10::OperatorHandle& op, Stack* stack) { call(op, stack); }

// Memory.

at::Tensor empty(
    c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "empty: only strided tensors");
  c10::OptionalDeviceGuard guard(device);
  return at::Tensor(at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), c10::GetAllocator(kDeviceType), kKeys, c10::dtype_or_default(dtype),
      memory_format));
}

at::Tensor emptyStridedOperator(
    c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/, std::optional<at::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::Tensor(at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), c10::GetAllocator(kDeviceType), kKeys,
      c10::dtype_or_default(dtype)));
}

const at::Tensor& resize(
    const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat> memory_format) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto new_sizes = C10_AS_INTARRAYREF_SLOW(sizes);
  if (self.sizes() != new_sizes) {
    growStorage(
        self.storage(), at::detail::computeStorageNbytesContiguous(new_sizes, self.itemsize(), self.storage_offset()));
    impl->set_sizes_contiguous(new_sizes);
  }
  if (memory_format) {
    impl->empty_tensor_restride(*memory_format);
  }
  return self;
}

at::Tensor& setStorage(
    at::Tensor& self, const c10::Storage& storage, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
  TORCH_CHECK(
      storage.device().type() == kDeviceType, "Attempted to set the storage of a tensor on device \"", self.device(),
      "\" to a storage on different device \"", storage.device(), "\".");
  growStorage(
      storage,
      strides.empty() && !sizes.empty() ? at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), offset)
                                        : at::detail::computeStorageNbytes(sizes, strides, self.itemsize(), offset));
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  if (strides.empty() && !sizes.empty()) {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset);
  } else {
    impl->set_sizes_and_strides(sizes, strides, offset);
  }
  return self;
}

at::Tensor& setSourceStorageOffset(
    at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return setStorage(
      self, storage, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
      offset.guard_int(__FILE__, __LINE__));
}

at::Tensor& setSourceStorage(at::Tensor& self, at::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return setStorage(self, storage, {elements}, {1}, 0);
}

at::Tensor& setSourceTensor(at::Tensor& self, const at::Tensor& source) {
  return setStorage(self, source.storage(), source.sizes(), source.strides(), source.storage_offset());
}

at::Tensor& setNothing(at::Tensor& self) { return setSourceTensor(self, at::empty({0}, self.options())); }

void recordStreamOperator(at::Tensor& self, c10::Stream stream) { recordStream(self.storage().data_ptr(), stream); }

// Copies.

// Lets `stream` wait for what `other` has been given so far.
void orderAfter(c10::Stream stream, c10::Stream other) {
  if (stream == other) {
    return;
  }
  void* event = nullptr;
  recordEvent(&event, other, other.device_index());
  waitForEvent(event, stream);
  destroyEvent(event);
}

void copyInTask(const at::Tensor& to, const at::Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView guard;
  to.copy_(from);
}

void copyOnDevices(const at::Tensor& from, const at::Tensor& to) {
  const auto stream = currentStream(from.device().index());
  const auto other = currentStream(to.device().index());
  Mirrors mirrors(c10::DeviceType::CPU);
  orderAfter(stream, other);
  enqueue(
      stream, "copy", {accessOf(from, false), accessOf(to, true)},
      [to = mirrors.of(to), from = mirrors.of(from)](const auto& is_poisoned) {
        copyInTask(to, from);
        if (is_poisoned) {
          poison(to);
        }
      });
  orderAfter(other, stream);
}

// The source is not kept alive for the copy's sake: a source that dies before it is a mistake of the caller's, for
// which the copy is poison. It is only not unmapped, so that the mistake is no crash.
void copyFromHost(const at::Tensor& from, const at::Tensor& to, bool is_blocking) {
  const auto stream = currentStream(to.device().index());
  const bool is_pinned = isPinned(from.storage().data());
  Mirrors mirrors(c10::DeviceType::CPU);
  auto source = is_pinned || is_blocking ? c10::Storage() : from.storage();
  const auto task = enqueue(
      stream, "copy from the host", {accessOf(from, false), accessOf(to, true)},
      [to = mirrors.of(to), from = mirrors.of(from), source, device = to.device().index()](const auto& is_poisoned) {
        const bool has_died = source && source.use_count() == 1;
        copyInTask(to, from);
        useHostLink(device, /*to_host=*/false, from.nbytes());
        if (has_died) {
          noteConflict("the host memory of a copy with non_blocking=True was freed before the copy");
        }
        if (is_poisoned || has_died) {
          poison(to);
        }
      });
  if (is_pinned) {
    recordPinned(from.storage().data(), stream);
  }
  if (is_blocking) {
    waitForTask(task);
  }
}

void copyToHost(const at::Tensor& from, const at::Tensor& to, bool is_blocking) {
  const auto stream = currentStream(from.device().index());
  const bool is_pinned = isPinned(to.storage().data());
  Mirrors mirrors(c10::DeviceType::CPU);
  auto target = is_pinned ? c10::Storage() : to.storage();
  const auto target_access = accessOf(to, true);
  if (!is_blocking && !isHostMemoryInUse(target_access.begin, target_access.bytes)) {
    poison(to.detach());  // what the host finds if it does not wait
  }
  const auto task = enqueue(
      stream, "copy to the host", {accessOf(from, false), target_access},
      [to = mirrors.of(to), from = mirrors.of(from), target, device = from.device().index()](const auto& is_poisoned) {
        copyInTask(to, from);
        useHostLink(device, /*to_host=*/true, from.nbytes());
        if (is_poisoned) {
          poison(to);
        }
      });
  if (is_pinned) {
    recordPinned(to.storage().data(), stream);
  }
  if (is_blocking) {
    waitForTask(task);
  }
}

at::Tensor copyFrom(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) {
    return to;
  }
  if (isSimulated(from) && isSimulated(to)) {
    copyOnDevices(from, to);
  } else if (isSimulated(to)) {
    TORCH_CHECK(from.is_cpu(), "cannot copy from ", from.device(), " to ", to.device());
    copyFromHost(from, to, !non_blocking);
  } else {
    TORCH_CHECK(to.is_cpu(), "cannot copy from ", from.device(), " to ", to.device());
    copyToHost(from, to, !non_blocking);
  }
  return to;
}

at::Tensor copyFromAndResize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copyFrom(from, to, /*non_blocking=*/false);
}

// Convolutions: the operators for backends out of torch's tree have the arguments of the general ones.

c10::OperatorHandle findOperator(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

void convolution(const c10::OperatorHandle& /*op*/, Stack* stack) {
  static const auto general = findOperator("aten::convolution");
  call(general, stack);
}

void convolutionBackward(const c10::OperatorHandle& op, Stack* stack) {
  static const auto general = findOperator("aten::convolution_backward");
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  const auto channels = first->toTensor().size(1);
  stack->insert(first + 3, IValue(c10::List<int64_t>({channels})));  // bias_sizes
  call(general, stack);
}

// Cells of recurrent networks: torch has fused kernels for the devices of others only, and expects them of this one.

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstmCell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cell,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  auto gates = input_gates + hidden_gates;
  for (const auto& bias : {input_bias, hidden_bias}) {
    gates = bias && bias->defined() ? gates + *bias : gates;
  }
  const auto parts = gates.chunk(4, 1);
  auto new_cell = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  auto hidden = parts[3].sigmoid() * new_cell.tanh();
  return {hidden, new_cell, at::empty({0}, cell.options())};
}

std::tuple<at::Tensor, at::Tensor> gruCell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& hidden,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  const auto input = (input_bias && input_bias->defined() ? input_gates + *input_bias : input_gates).chunk(3, 1);
  const auto state = (hidden_bias && hidden_bias->defined() ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  const auto reset = (input[0] + state[0]).sigmoid();
  const auto update = (input[1] + state[1]).sigmoid();
  const auto candidate = (input[2] + reset * state[2]).tanh();
  return {candidate + update * (hidden - candidate), at::empty({0}, hidden.options())};
}

// Sparse tensors: operators wait and run on the CPU; only what takes a tensor apart or makes one does not.

void setSparse(const at::Tensor& tensor, const at::Tensor& source) {
  auto* impl = at::sparse::get_sparse_impl(tensor);
  impl->resize_(source.sparse_dim(), source.dense_dim(), source.sizes());
  impl->set_indices_and_values_unsafe(
      source._indices().to(tensor.device(), at::kLong, false, /*copy=*/true),
      source._values().to(tensor.device(), tensor.scalar_type(), false, /*copy=*/true));
  impl->set_coalesced(source.is_coalesced());
}

void callSparse(const c10::OperatorHandle& op, Stack* stack) {
  checkUsable();
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size()).vec();
  const auto device = checkDevices(schema, arguments);
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  Stack cpu_stack;
  for (const auto& argument : arguments) {
    cpu_stack.push_back(
        argument.isDevice() ? IValue(c10::Device(c10::kCPU)) : mapTensors(argument, [&](const at::Tensor& tensor) {
          if (!isSimulated(tensor)) {
            return tensor;
          }
          copies.emplace_back(tensor, tensor.cpu());
          return copies.back().second;
        }));
  }
  op.callBoxed(&cpu_stack);
  size_t next = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    forEachTensor(arguments[i], [&](const at::Tensor& tensor) {
      if (!isSimulated(tensor)) {
        return;
      }
      const auto& [original, copy] = copies.at(next++);
      if (isWritten(schema, i) && original.is_sparse()) {
        setSparse(original, copy);
      } else if (isWritten(schema, i)) {
        original.copy_(copy);
      }
    });
  }
  torch::jit::drop(*stack, arguments.size());
  for (const auto& result : cpu_stack) {
    stack->push_back(mapTensors(result, [&](const at::Tensor& tensor) {
      for (const auto& [original, copy] : copies) {
        if (tensor.is_same(copy)) {
          return original;
        }
      }
      return tensor.defined() ? tensor.to(device) : tensor;
    }));
  }
}

at::Tensor sparseTensor(
    int64_t sparse_dim, int64_t dense_dim, c10::SymIntArrayRef sizes, const at::Tensor& indices,
    const at::Tensor& values, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin_memory, std::optional<bool> is_coalesced) {
  c10::DeviceGuard guard(values.device());
  return at::native::new_with_dims_and_tensor_sparse_symint(
      sparse_dim, dense_dim, sizes, indices, values, dtype, layout, device, pin_memory, is_coalesced);
}

at::Tensor cloneSparse(const at::Tensor& self, std::optional<at::MemoryFormat> /*memory_format*/) {
  return at::_sparse_coo_tensor_unsafe(
      self._indices().clone(), self._values().clone(), self.sizes(), self.options(), self.is_coalesced());
}

at::Tensor& copySparse(at::Tensor& self, const at::Tensor& source, bool /*non_blocking*/) {
  TORCH_CHECK(self.is_sparse() && source.is_sparse(), "copy_: only between sparse tensors");
  setSparse(self, source);
  return self;
}

}  // namespace

// Above autograd, so that it sees the operators within.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstmCell));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gruCell));
}

// torch would resolve the bits by a copy, which has them, too.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&callSparse>()); }

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", TORCH_FN(sparseTensor));
  m.impl("clone", TORCH_FN(cloneSparse));
  m.impl("copy_", TORCH_FN(copySparse));
  m.impl("_indices", TORCH_FN(at::native::_indices_sparse));
  m.impl("_values", TORCH_FN(at::native::_values_sparse));
  m.impl("indices", TORCH_FN(at::native::indices_sparse));
  m.impl("values", TORCH_FN(at::native::values_sparse));
  m.impl("sparse_dim", TORCH_FN(at::native::sparse_dim_sparse));
  m.impl("dense_dim", TORCH_FN(at::native::dense_dim_sparse));
  m.impl("_nnz", TORCH_FN(at::native::_nnz_sparse));
  m.impl("is_coalesced", TORCH_FN(at::native::is_coalesced_sparse));
  m.impl("_coalesced_", TORCH_FN(at::native::_coalesced_sparse_));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstmCell));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gruCell));
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &emptyStridedOperator);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &setSourceStorageOffset);
  m.impl("set_.source_Storage", &setSourceStorage);
  m.impl("set_.source_Tensor", &setSourceTensor);
  m.impl("set_", &setNothing);
  m.impl("record_stream", &recordStreamOperator);
  m.impl("_copy_from", &copyFrom);
  m.impl("_copy_from_and_resize", &copyFromAndResize);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolutionBackward>());
}

}  // namespace simulated
