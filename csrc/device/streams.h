#pragma once

// Streams and events of any torch device, by c10's own interfaces. Work on an accelerator is queued on a stream and
// runs later; what another stream, or the CPU, does with its results has to wait for it. Any thread.

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <vector>

#include "base/sync/mutex.h"

namespace torchrpc {

using Devices = std::vector<c10::Device>;
using Streams = std::vector<c10::Stream>;

/// Whether work on that device is queued on streams: all devices but the CPU and meta.
bool isAccelerator(const c10::Device& device);

/// The streams that are current on this thread; a stream of torch's pool for each device. Devices without streams, such
/// as the CPU, have none.
Streams currentStreams(const Devices& devices);
Streams pooledStreams(const Devices& devices);
/// Streams of high priority, for copies that must not wait for the work of functions: those get other streams.
Streams copyStreams(const Devices& devices);

/// Values that live until device work that uses them has run. Thread-safe.
class KeptValues {
 public:
  void add(c10::IValue value);

 private:
  Mutex mutex_;
  std::vector<c10::IValue> values_ TORCHRPC_GUARDED_BY(mutex_);
};

/// While it lives, these streams are the current ones of their devices on this thread.
class StreamScope {
 public:
  /// `kept`: where keep() puts values; null: nowhere.
  explicit StreamScope(Streams streams, std::shared_ptr<KeptValues> kept = nullptr);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

  /// The streams of the innermost scope of this thread; empty: there is none.
  static const Streams& current();
  /// Of the same.
  static std::shared_ptr<KeptValues> currentKept();
  /// For a value that this thread will use on its streams, and that others can release: it is kept as long as the work
  /// of the innermost scope needs it.
  static void keep(const c10::IValue& value);

 private:
  const StreamScope* const outer_;
  const Streams streams_;
  const std::shared_ptr<KeptValues> kept_;
  Streams previous_;
};

/// A point on each of some streams. Immutable.
class StreamEvents {
 public:
  /// What has been queued on these streams until now.
  explicit StreamEvents(const Streams& streams);

  /// Whether all of it has run.
  bool haveEnded() const;
  /// Blocks the thread until all of it has run.
  void synchronize() const;
  /// What is queued from now on on this thread's current streams of `devices` runs after it.
  void blockCurrentStreams(const Devices& devices) const;

 private:
  std::vector<c10::Event> events_;
};
using StreamEventsPtr = std::shared_ptr<const StreamEvents>;

/// The accelerators that the nodes of this process use. Values that were computed on them have to be waited for; where
/// there are none, nothing is recorded, and that costs a load.
class UsedDevices {
 public:
  static void add(const Devices& devices);
  static Devices all();
  /// The work on the current streams of these devices; null: no node uses any.
  static StreamEventsPtr record();
  /// What this thread queues from now on, on any of them, runs after `events`, which may be null.
  static void waitFor(const StreamEventsPtr& events);
};

}  // namespace torchrpc
