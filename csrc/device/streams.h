#pragma once

// Streams and events of any torch device, by c10's interfaces. Work on an accelerator is queued on a stream and runs
// later, so another stream, or the CPU, has to wait for it before it uses the results. Threads: any.

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

/// The current streams of this thread, one for each device. Devices without streams, such as the CPU, are left out.
Streams currentStreams(const Devices& devices);
/// A stream of torch's pool for each device. Devices without streams are left out.
Streams pooledStreams(const Devices& devices);
/// High-priority streams for copies. Functions get other streams, so a copy does not wait for their work.
Streams copyStreams(const Devices& devices);

/// Keeps values alive until the device work that uses them has run. Thread-safe.
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
  /// keep() adds values to `kept`, unless it is null.
  explicit StreamScope(Streams streams, std::shared_ptr<KeptValues> kept = nullptr);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

  /// The streams of this thread's innermost scope; empty without one.
  static const Streams& current();
  /// The KeptValues of this thread's innermost scope.
  static std::shared_ptr<KeptValues> currentKept();
  /// Keeps a value that this thread will use on its streams, and that another thread may release, as long as the work
  /// of the innermost scope needs it.
  static void keep(const c10::IValue& value);

 private:
  const StreamScope* const outer_;
  const Streams streams_;
  const std::shared_ptr<KeptValues> kept_;
  Streams previous_;
};

/// One event on each of several streams. Immutable.
class StreamEvents {
 public:
  /// Records the work that has been queued on these streams until now.
  explicit StreamEvents(const Streams& streams);

  /// Whether all recorded work has run.
  bool haveEnded() const;
  /// Blocks the calling thread until all recorded work has run.
  void synchronize() const;
  /// Work that is queued from now on on this thread's current streams of `devices` runs after the recorded work.
  void blockCurrentStreams(const Devices& devices) const;

 private:
  std::vector<c10::Event> events_;
};
using StreamEventsPtr = std::shared_ptr<const StreamEvents>;

/// The accelerators that the nodes of this process use. Values computed on them need events to wait for. Without
/// accelerators nothing is recorded, which costs one atomic load.
class UsedDevices {
 public:
  static void add(const Devices& devices);
  static Devices all();
  /// Records the work on the current streams of these devices; null if there are none.
  static StreamEventsPtr record();
  /// Work that this thread queues from now on on any of these devices runs after `events`, which may be null.
  static void waitFor(const StreamEventsPtr& events);
};

}  // namespace torchrpc
