#pragma once

// The Messenger through which tensors of accelerators travel. Messages above it have their tensors on devices, messages
// below it have them in host memory, with a header that says where each goes. It chooses the device by the maps of this
// worker, waits for the work that computes a tensor before it is sent, and serves requests on streams of their own.
// Threads: as Messenger.
//
// Note [Order of device work]
// - A message is sent when all that the sending thread had queued on the current streams of its tensors' devices has
//   run. The thread does not wait for that: the pool does.
// - A request is served with a stream of torch's pool as the current one of each device that this worker uses. When the
//   function starts, its tensors are there.
// - The reply is sent when all that the function has queued on these streams has run. So what one call has changed on
//   a device, the next one sees, wherever it comes from.
// - When a reply has arrived, its tensors are there: no stream has to wait for them.

#include <atomic>
#include <functional>
#include <memory>

#include "agent/messenger.h"
#include "base/sync/mutex.h"
#include "device/device_map.h"
#include "device/streams.h"

namespace torchrpc {

class DeviceMessenger final : public ForwardingMessenger {
 public:
  struct Events {
    /// Returns what keeps the node from taking itself for idle; called while a message waits for a device.
    std::function<std::shared_ptr<void>()> hold;
    /// A reply is not sent: resources in it stay on this worker.
    std::function<void(const Message&)> on_unsent_reply;
  };

  /// `messenger` must outlive it.
  DeviceMessenger(Messenger& messenger, Events events) : ForwardingMessenger(messenger), events_(std::move(events)) {}

  /// The maps from now on; a message has those of the moment at which it is sent.
  void use(DeviceMaps maps);

  void request(WorkerId to, Message message, Duration timeout, ReplyHandler handler) override;
  void on(Kind kind, Where where, RequestHandler handler) override;
  void onLoopFirst(Kind kind, LoopHandler handler) override;
  /// With the streams that are current in the calling thread's StreamScope.
  void post(std::function<void()> task) override;
  void postToStrand(std::function<void()> task) override;

 private:
  using Maps = std::shared_ptr<const DeviceMaps>;
  struct Outgoing;

  /// Null: this worker uses no devices.
  Maps maps() const;
  /// Takes the message and queues the copies of its tensors to host memory; it is sent after them, and after what is
  /// queued on the streams `served`. `maps` may be null; `by_name` are those of them that count. Throws, and leaves
  /// the message as it was.
  Outgoing stage(
      Message& message, const DeviceMaps* maps, std::map<std::string, DeviceMap> DeviceMaps::* by_name,
      const std::string& to, const Streams& served) const;
  /// Calls `send` when the work that the message depends on has run, or `fail`; at once, or on the pool.
  void whenStaged(Outgoing outgoing, std::function<void(Message)> send, const std::function<void(const Error&)>& fail);
  /// Puts the tensors of a message that has arrived where its header says. `users`: the streams on which they will be
  /// used. Blocks until they are there. Throws Error.
  void unstage(Message& message, const DeviceMaps& maps, const std::string& from, const Streams& users) const;
  ReplyHandler unstaging(WorkerId from, Maps maps, ReplyHandler handler);
  /// Calls the handler with a responder that sends the reply's tensors, after the work on the streams of this scope.
  void serve(Maps maps, const RequestHandler& handler, Request request, const Responder& responder);
  /// The same for a request in the strand whose tensors are many bytes: the pool copies them to the devices.
  void serveOnStrand(
      Maps maps, const std::shared_ptr<const RequestHandler>& handler, Request request, const Responder& responder);

  const Events events_;
  std::atomic<bool> has_maps_{false};
  mutable Mutex mutex_;
  Maps maps_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
