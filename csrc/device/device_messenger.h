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
//
// Note [Lent memory]
// Instead of large tensors, the sender lends a copy of them that is on the device, or the tensors themselves if nothing
// else refers to them. A receiver in the same process takes the memory over. One that can map memory of the device
// (MemoryPaths) copies from it, any other one reads it in chunks (chunked_read.h). Both return it (MEMORY_RETURN)
// before the tensors are used: so they use no memory of a process that may end. The sender takes back what it has lent
// - of a request that ends with an error, by MEMORY_RECLAIM: the receiver answers which loans it is not reading, and
//   refuses these from then on, so that a request that arrives late cannot use memory that has another content;
// - of a reply that was not sent;
// - when the receiver is lost.
// A message that may be sent more than once lends nothing.
// With Options::lends_in_place the sender lends the tensors themselves, and the receiver uses them where they are: it
// returns a loan when its tensors have ended, and the work that used them.

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agent/messenger.h"
#include "base/sync/mutex.h"
#include "device/device_map.h"
#include "device/lent_memory.h"
#include "device/memory_paths.h"
#include "device/prefetch_limit.h"
#include "device/streams.h"
#include "wire/limits.h"

namespace torchrpc {

class DeviceMessenger final : public ForwardingMessenger {
 public:
  struct Options {
    /// Returns what keeps the node from taking itself for idle; called while a message waits for a device.
    std::function<std::shared_ptr<void>()> hold;
    /// A reply is not sent: resources in it stay on this worker.
    std::function<void(const Message&)> on_unsent_reply;
    /// Whether that worker and this one may ask each other for memory: members of the group.
    std::function<bool(WorkerId)> may_borrow;
    Limits limits;  ///< also of what is read for a message
    /// Whether the other workers may see memory of this worker's devices.
    bool shares_memory = true;
    /// Receivers may use the memory of tensors that this worker sends, instead of a copy.
    bool lends_in_place = false;
    /// Whether this worker uses memory of others in place where they offer that.
    bool borrows_in_place = true;
  };

  /// `messenger` must outlive it.
  DeviceMessenger(Messenger& messenger, Options options);

  /// The maps from now on; a message has those of the moment at which it is sent.
  void use(DeviceMaps maps);

  /// Whether there are maps, of this worker or of others to it.
  bool isUsed() const { return has_maps_.load(std::memory_order_acquire); }

  // What the agent tells of messages that do not come through here; any thread.
  /// A reply was not sent; it has perhaps no tensors any more.
  void onUnsentReply(const Message& reply);
  /// A reply has arrived whose call has ended.
  void onLateReply(const Message& reply);
  void onWorkerLost(const WorkerInfo& worker);
  void onWorkerJoined(const WorkerInfo& worker, uint64_t incarnation);

  /// Whether that worker has to read or return memory that belongs to an answer of this one.
  bool isAwaited(WorkerId worker) const { return lent_.isAwaited(worker); }

  /// "device.path.worker1 cuda:0" and others, to texts.
  std::map<std::string, std::string> metrics() const;

  void request(WorkerId to, Message message, Duration timeout, ReplyHandler handler) override;
  void on(Kind kind, Where where, RequestHandler handler) override;
  void onLoopFirst(Kind kind, LoopHandler handler) override;
  /// With the streams that are current in the calling thread's StreamScope.
  void post(std::function<void()> task) override;
  void postToStrand(std::function<void()> task) override;

 private:
  using Maps = std::shared_ptr<const DeviceMaps>;
  using Storages = std::vector<c10::Storage>;
  struct Outgoing;
  struct Plan;
  enum class Lending : uint8_t;
  class Loan;

  /// Null: all tensors stay on the CPU.
  Maps maps() const;
  /// How `to` gets at memory of `source`; nullopt: the tensors, of so many bytes, travel in the message.
  std::optional<LoanAccess> accessTo(
      WorkerId to, const c10::Device& source, const c10::Device& target, uint64_t bytes, Lending lending);
  /// Where each tensor goes, by `map` (null: none) and what the message asks. Throws, if a tensor may not go anywhere.
  Plan planOf(
      const Message& message, const DeviceMaps* maps, const DeviceMap* map, const WorkerInfo& to, Lending lending);
  /// Queues the copies of the plan. Throws, and leaves the message as it was.
  Outgoing carryOut(const Plan& plan, Message& message, const WorkerInfo& to, const Streams& served);
  /// Takes the message, and queues copies of its tensors to host memory or, if it `lends` memory, on the device; it is
  /// sent after them, and after what is queued on the streams `served`. `maps` may be null; `by_name` are those of them
  /// that count. Throws, and leaves the message as it was.
  Outgoing stage(
      Message& message, const DeviceMaps* maps, std::map<std::string, DeviceMap> DeviceMaps::* by_name,
      const WorkerInfo& to, const Streams& served, bool lends);
  /// Lends the memory of those of the tensors that the plan says, and replaces them by their geometries.
  LentTensors lend(const Plan& plan, std::vector<at::Tensor>& tensors, const WorkerInfo& to, bool is_reply);
  /// Calls `send` when the work that the message depends on has run, or `fail`; at once, or on the pool.
  void whenStaged(Outgoing outgoing, std::function<void(Message)> send, const std::function<void(const Error&)>& fail);
  /// Puts the tensors of a message that has arrived where its headers say. `users`: the streams on which they will be
  /// used. Blocks until they are there. Throws Error.
  void unstage(Message& message, const DeviceMaps& maps, const WorkerInfo& from, const Streams& users);
  c10::Storage map(const LentTensors::Piece& piece, const Loan& loan);
  /// Replaces geometries by the tensors in lent memory. Those that have to be copied keep their entry in `to`.
  void openLoans(Message& message, Loan& loan, std::vector<std::optional<c10::Device>>& to);
  /// Returns the loans in place that have ended, and looks again after a while if there are others.
  void returnEnded();
  /// Calls it after a while.
  void scheduleReturns();
  ReplyHandler unstaging(WorkerId from, Maps maps, TimePoint deadline, ReplyHandler handler);
  /// Calls the handler with a responder that sends the reply's tensors, after the work on the streams of this scope.
  void serve(Maps maps, const RequestHandler& handler, Request request, const Responder& responder);
  /// The same for a request in the strand whose tensors are many bytes: the pool copies them to the devices, and it
  /// does not read too far ahead of the strand what is lent.
  void serveOnStrand(
      const Maps& maps, const std::shared_ptr<const RequestHandler>& handler, Request request,
      const Responder& responder);
  /// The receiver does not use these loans any more.
  void giveBack(WorkerId lender, const LoanNumbers& numbers);
  /// The request that carried these loans has failed.
  void reclaim(WorkerId from, const LoanNumbers& numbers);
  /// On the pool, since that may take long.
  void destroy(Storages storages);

  const Options options_;
  MemoryPaths paths_;
  LentMemory lent_;
  BorrowedMemory borrowed_;
  PrefetchLimit prefetched_;
  const std::shared_ptr<EndedLoans> ended_ = std::make_shared<EndedLoans>();
  std::atomic<bool> returns_ended_{false};  ///< returnEnded() will be called
  std::atomic<uint64_t> loans_{0};
  std::atomic<uint64_t> copied_tensors_{0};  ///< since others refer to them, too
  std::atomic<uint64_t> lending_failures_{0};
  std::atomic<bool> has_maps_{false};
  mutable Mutex mutex_;
  Maps maps_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
