#include "device/streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/sync/mutex.h"

namespace torchrpc {

namespace {

using c10::impl::VirtualGuardImpl;

thread_local const StreamScope* innermost_scope = nullptr;

template <typename StreamOf>
Streams streamsOf(const Devices& devices, const StreamOf& stream_of) {
  Streams streams;
  for (const auto& device : devices) {
    if (isAccelerator(device)) streams.push_back(stream_of(VirtualGuardImpl(device.type()), device));
  }
  return streams;
}

}  // namespace

bool isAccelerator(const c10::Device& device) { return !device.is_cpu() && !device.is_meta(); }

Streams currentStreams(const Devices& devices) {
  return streamsOf(
      devices, [](const VirtualGuardImpl& guard, const c10::Device& device) { return guard.getStream(device); });
}

Streams pooledStreams(const Devices& devices) {
  return streamsOf(devices, [](const VirtualGuardImpl& guard, const c10::Device& device) {
    return guard.getStreamFromGlobalPool(device);
  });
}

Streams copyStreams(const Devices& devices) {
  return streamsOf(devices, [](const VirtualGuardImpl& guard, const c10::Device& device) {
    return guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  });
}

void KeptValues::add(c10::IValue value) {
  MutexLock lock(mutex_);
  values_.push_back(std::move(value));
}

StreamScope::StreamScope(Streams streams, std::shared_ptr<KeptValues> kept)
    : outer_(innermost_scope), streams_(std::move(streams)), kept_(std::move(kept)) {
  for (const auto& stream : streams_)
    previous_.push_back(VirtualGuardImpl(stream.device_type()).exchangeStream(stream));
  innermost_scope = this;
}

StreamScope::~StreamScope() {
  innermost_scope = outer_;
  for (const auto& stream : previous_) VirtualGuardImpl(stream.device_type()).exchangeStream(stream);
}

const Streams& StreamScope::current() {
  static const Streams none;
  return innermost_scope ? innermost_scope->streams_ : none;
}

std::shared_ptr<KeptValues> StreamScope::currentKept() { return innermost_scope ? innermost_scope->kept_ : nullptr; }

void StreamScope::keep(const c10::IValue& value) {
  if (innermost_scope && innermost_scope->kept_) innermost_scope->kept_->add(value);
}

StreamEvents::StreamEvents(const Streams& streams) {
  events_.reserve(streams.size());
  for (const auto& stream : streams) events_.emplace_back(stream.device_type()).record(stream);
}

bool StreamEvents::haveEnded() const {
  return std::ranges::all_of(events_, [](const c10::Event& event) { return event.query(); });
}

void StreamEvents::synchronize() const {
  for (const auto& event : events_) event.synchronize();
}

void StreamEvents::blockCurrentStreams(const Devices& devices) const {
  for (const auto& stream : currentStreams(devices)) {
    for (const auto& event : events_) {
      if (event.device_type() == stream.device_type()) event.block(stream);
    }
  }
}

namespace {

struct Used {
  std::atomic<bool> any{false};
  Mutex mutex;
  Devices devices TORCHRPC_GUARDED_BY(mutex);
};

Used& used() {
  static Used instance;
  return instance;
}

}  // namespace

void UsedDevices::add(const Devices& devices) {
  MutexLock lock(used().mutex);
  for (const auto& device : devices) {
    if (isAccelerator(device) && std::ranges::find(used().devices, device) == used().devices.end()) {
      used().devices.push_back(device);
    }
  }
  if (!used().devices.empty()) used().any.store(true, std::memory_order_release);
}

Devices UsedDevices::all() {
  if (!used().any.load(std::memory_order_acquire)) return {};
  MutexLock lock(used().mutex);
  return used().devices;
}

StreamEventsPtr UsedDevices::record() {
  if (!used().any.load(std::memory_order_acquire)) return nullptr;
  return std::make_shared<const StreamEvents>(currentStreams(all()));
}

void UsedDevices::waitFor(const StreamEventsPtr& events) {
  if (events) events->blockCurrentStreams(all());
}

}  // namespace torchrpc
