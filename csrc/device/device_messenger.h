#pragma once

// The Messenger that sends and receives tensors of accelerators. Above it, the tensors of messages are on devices.
// Below it, they are in host memory, and a header gives the device of each. DeviceMessenger chooses the devices by the
// device maps of this worker, sends a message after the work that computes its tensors, and serves each request on its
// own streams. Threads: as Messenger.
//
// Note [Order of device work]
// - A message is sent after all work that the sending thread had queued on the current streams of its tensors' devices.
//   The sending thread does not wait for this work; a thread of the pool does.
// - While a request is served, the current stream of each device that this worker uses is one of torch's pool. The
//   tensors of the request are complete before the function starts.
// - The reply is sent after all work that the function has queued on these streams. So a call sees everything that
//   earlier calls have changed on a device, whichever worker made them.
// - The tensors of a reply are complete when the caller gets them, so no stream has to wait for them.
//
// Note [Lent memory]
// The sender does not send the bytes of large tensors. It lends a copy of the tensors on the same device, or the
// tensors themselves if nothing else refers to them. A receiver in the same process takes the memory over. A receiver
// that can map the device's memory (MemoryPaths) copies from it. Any other receiver reads it in chunks
// (chunked_read.h). The last two return the loan (MEMORY_RETURN) before the function uses the tensors, so no tensor
// depends on the sender's process. The sender takes loans back
// - when their request ends with an error, by MEMORY_RECLAIM: the receiver answers which of the loans it does not use,
//   and refuses them from then on. So a request that arrives late cannot read memory that has been reused;
// - when their reply was not sent;
// - when the receiver is lost.
// A message that may be sent more than once lends nothing.
// With Options::lends_in_place the sender lends the tensors themselves, and the receiver uses them without a copy. It
// returns the loan when the tensors have been destroyed and the work that used them has run.

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/sync/mutex.h"
#include "calls/messenger.h"
#include "device/device_map.h"
#include "device/memory_paths.h"
#include "device/prefetch_limit.h"
#include "device/streams.h"
#include "device/tensor_loans.h"
#include "wire/limits.h"

namespace torchrpc {

class DeviceMessenger final : public ForwardingMessenger {
 public:
  struct Options {
    /// Returns an object that keeps the node from counting as idle; held while a message waits for a device.
    std::function<std::shared_ptr<void>()> hold;
    /// Called with a reply that is not sent, so that resources in it can be released on this worker.
    std::function<void(const Message&)> on_unsent_reply;
    /// Whether that worker may borrow memory from this one. True for members of the group, false for clients.
    std::function<bool(WorkerId)> may_borrow;
    Limits limits;  ///< of messages; what is read in chunks for a message counts, too
    /// Whether other processes may map memory of this worker's devices.
    bool shares_memory = true;
    /// Whether receivers may use the memory of tensors that this worker sends without copying them.
    bool lends_in_place = false;
    /// Whether this worker uses memory of other workers without copying it, where they allow that.
    bool borrows_in_place = true;
  };

  /// `messenger` must outlive it.
  DeviceMessenger(Messenger& messenger, Options options);

  /// Replaces the maps. A call uses the maps of the moment at which it is made, for its reply, too.
  void use(DeviceMaps maps);

  /// Whether this worker has maps, or other workers have maps to it.
  bool isUsed() const { return has_maps_.load(std::memory_order_acquire); }

  // Called by the agent about messages that do not pass through this object; any thread.
  /// A reply was not sent. Its tensors may have been dropped already.
  void onUnsentReply(const Message& reply);
  /// A reply arrived after its call had ended.
  void onLateReply(const Message& reply) { loans_.onLateReply(reply); }
  void onWorkerLost(const WorkerInfo& worker);
  void onWorkerJoined(const Peer& peer) { loans_.onWorkerJoined(peer.peerId()); }

  /// Whether that worker still has to read, or to return, memory of a reply of this worker.
  bool isAwaited(WorkerId worker) const { return loans_.isAwaited(worker); }

  /// Metrics by name, for example "device.path.worker1 cuda:0".
  std::map<std::string, std::string> metrics() const;

  void request(WorkerId to, Message&& message, Duration timeout, ReplyHandler&& handler) override;
  void on(Kind kind, Where where, RequestHandler handler) override;
  void onLoopFirst(Kind kind, LoopHandler handler) override;
  /// The task runs with the streams of the calling thread's StreamScope as current streams.
  void post(Task&& task) override;
  void postToStrand(Task&& task) override;

 private:
  using Maps = std::shared_ptr<const DeviceMaps>;
  struct Outgoing;
  struct Plan;
  enum class Lending : uint8_t;

  /// Null: all tensors stay on the CPU.
  Maps maps() const;
  /// How `to` may access `bytes` of memory of `source`; nullopt: they are sent in the message.
  std::optional<LoanAccess> accessTo(
      WorkerId to, const c10::Device& source, const c10::Device& target, uint64_t bytes, Lending lending);
  /// Chooses the device of each tensor on the receiver, by the header kDevices of the message, by `map` (may be null),
  /// and by the maps. Throws Error if a tensor of an accelerator has none.
  Plan planOf(
      const Message& message, const DeviceMaps* maps, const DeviceMap* map, const WorkerInfo& to, Lending lending);
  /// Queues the copies of the plan and makes its loans. If it throws, the message is unchanged.
  Outgoing carryOut(const Plan& plan, Message& message, const WorkerInfo& to, const Streams& served);
  /// Prepares the message to be sent: queues the copies of its tensors to host memory or, if it `lends` memory, on the
  /// device. It may be sent after these copies, and after all work on the streams `served`. `by_name` selects the maps
  /// of requests or of replies in `maps`, which may be null. If it throws, the message is unchanged.
  Outgoing stage(
      Message& message, const DeviceMaps* maps, std::map<std::string, DeviceMap> DeviceMaps::* by_name,
      const WorkerInfo& to, const Streams& served, bool lends);
  /// Calls `send` when the work that the message depends on has run, or `fail` on an error. The call is made at once if
  /// the work has run already, otherwise on the pool.
  void whenStaged(Outgoing outgoing, std::function<void(Message)> send, const std::function<void(const Error&)>& fail);
  /// Copies the tensors of a received message to the devices in its header. `users`: the streams on which they will be
  /// used. Blocks until the copies are complete. Throws Error.
  void unstage(Message& message, const DeviceMaps& maps, const WorkerInfo& from, const Streams& users);
  ReplyHandler unstaging(WorkerId from, Maps maps, TimePoint deadline, ReplyHandler handler);
  /// Calls the handler with a responder that sends the reply, tensors included, after the work on the current streams.
  void serve(Maps maps, const RequestHandler& handler, Request&& request, const Responder& responder);
  /// The same for a request of the strand with large tensors. A thread of the pool copies them to the devices, so that
  /// the strand does not wait. PrefetchLimit bounds the lent tensors that are read ahead of the strand.
  void serveOnStrand(
      const Maps& maps, const std::shared_ptr<const RequestHandler>& handler, Request&& request,
      const Responder& responder);

  const Options options_;
  MemoryPaths paths_;
  TensorLoans loans_;
  PrefetchLimit prefetched_;
  std::atomic<uint64_t> copied_tensors_{0};  ///< tensors that were copied to be lent, because others refer to them
  std::atomic<uint64_t> lending_failures_{0};
  std::atomic<bool> has_maps_{false};
  mutable Mutex mutex_;
  Maps maps_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
