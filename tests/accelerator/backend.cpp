// What torch knows the accelerator by: device guard, allocators, hooks, generators.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <deque>

#include "generator.h"
#include "runtime.h"

namespace simulated {
namespace {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;

c10::DeviceIndex indexOrCurrent(c10::DeviceIndex index) { return index < 0 ? currentDevice() : index; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kDeviceType, simulated::exchangeDevice(indexOrCurrent(device.index()))};
  }
  c10::Device getDevice() const override { return {kDeviceType, currentDevice()}; }
  void setDevice(c10::Device device) const override { simulated::exchangeDevice(indexOrCurrent(device.index())); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDeviceUnchecked(device.index()); }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(simulated::deviceCount());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { simulated::synchronizeDevice(device); }

  c10::Stream getStream(c10::Device device) const override { return currentStream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return defaultStream(device.index()); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high_priority) const override {
    return streamFromPool(device.index(), is_high_priority);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return streamFromPool(device.index(), priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return simulated::exchangeStream(stream); }
  bool queryStream(const c10::Stream& stream) const override { return isStreamIdle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { simulated::synchronizeStream(stream); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device, const c10::EventFlag /*flag*/)
      const override {
    recordEvent(event, stream, device);
  }
  void block(void* event, const c10::Stream& stream) const override { waitForEvent(event, stream); }
  bool queryEvent(void* event) const override { return isEventComplete(event); }
  void synchronizeEvent(void* event) const override { simulated::synchronizeEvent(event); }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex /*device*/) const override {
    return elapsedMilliseconds(start, end);
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    simulated::destroyEvent(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    recordStream(memory, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return simulated::allocate(bytes); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { copyMemory(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    simulated::recordStream(memory, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& bytes = stats.allocated_bytes[0];
    bytes.current = static_cast<int64_t>(allocatedBytes(device));
    bytes.peak = static_cast<int64_t>(peakAllocatedBytes(device));
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex device) override { resetPeakAllocatedBytes(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto total = memoryLimitBytes(device);
    return {total - std::min(total, allocatedBytes(device)), total};
  }
};

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override { return allocatePinned(bytes); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void* pointer, void* /*context*/, c10::Stream stream) override {
    return recordPinned(pointer, stream);
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceMemory& deviceMemory() {
  static auto* const memory = new DeviceMemory;
  return *memory;
}

PinnedMemory& pinnedMemory() {
  static auto* const memory = new PinnedMemory;
  return *memory;
}

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(kDeviceType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override { numbers.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { numbers.set_offset(offset); }
  uint64_t get_offset() const override { return numbers.get_offset(); }
  uint64_t current_seed() const override { return numbers.current_seed(); }
  uint64_t seed() override { return numbers.seed(); }
  void set_state(const c10::TensorImpl& state) override { numbers.set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return numbers.get_state(); }

  at::CPUGeneratorImpl numbers;

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->numbers.set_engine(const_cast<at::CPUGeneratorImpl&>(numbers).engine());
    return copy;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return isInitialized(); }
  void init() const override { checkUsable(); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(simulated::deviceCount()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { simulated::exchangeDevice(device); }
  c10::DeviceIndex getCurrentDevice() const override { return currentDevice(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? static_cast<c10::DeviceIndex>(-1) : simulated::exchangeDevice(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return isPinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinnedMemory(); }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    const auto device = deviceOfPointer(pointer);
    TORCH_CHECK(
        device >= 0, "The specified pointer resides on host memory and is not registered with any simulated device.");
    return {kDeviceType, device};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return defaultGenerator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return makeGenerator(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const auto used_bytes = std::min(bytes, storage.nbytes());
    const auto previous = simulated::exchangeDevice(storage.device().index());
    auto memory = deviceMemory().allocate(bytes);
    if (used_bytes > 0) {
      deviceMemory().copy_data(memory.get(), storage.data(), used_bytes);
    }
    simulated::exchangeDevice(previous);
    storage.set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

struct Registration {
  Registration() {
    c10::SetAllocator(kDeviceType, &deviceMemory());
    at::setHostAllocator(kDeviceType, &pinnedMemory());
    at::RegisterPrivateUse1HooksInterface(new Hooks);
  }
};

const Registration registration;

}  // namespace

const at::Generator& defaultGenerator(c10::DeviceIndex device) {
  static auto* const generators = [] {
    auto* made = new std::deque<at::Generator>;
    for (int i = 0; i < deviceCount(); ++i) {
      made->push_back(makeGenerator(static_cast<c10::DeviceIndex>(i)));
    }
    return made;
  }();
  return generators->at(indexOrCurrent(device));
}

at::Generator makeGenerator(c10::DeviceIndex device) { return at::make_generator<Generator>(indexOrCurrent(device)); }

at::Generator generatorForTask(const at::Generator& generator) {
  auto* impl = static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  std::lock_guard lock(impl->mutex_);
  return at::detail::createCPUGenerator(impl->numbers.random64());
}

}  // namespace simulated
