#pragma once

// A UCX worker (ucp_worker_h), its endpoints, and the loop thread, which alone uses them.

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/sync/mutex.h"
#include "transport/callbacks.h"
#include "transport/disposal.h"
#include "transport/ucx/address.h"
#include "transport/ucx/libucp.h"
#include "wire/limits.h"

namespace torchrpc::ucx {

class UcxConnection;

/// The ids of active messages, which are part of the protocol between two workers: Note [Frames as active messages].
enum class PartKind : unsigned { kHead = 1, kSegment = 2, kEnd = 3 };

/// The state that a transport and its connections share. It outlives both.
class UcxWorker {
 public:
  /// Starts the loop thread. Throws Error(kInvalidArgument) if UCX does not work on this machine.
  explicit UcxWorker(const Limits& limits);
  /// After stop().
  ~UcxWorker() = default;
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  const Libucp& ucp;
  const Limits limits;
  Callbacks callbacks;
  Disposal disposal;

  /// Runs the task on the loop, and never inside a UCX callback. Thread-safe. Must not be called after stop().
  void post(std::function<void()> task);
  /// Blocks until all endpoints are closed and the loop thread has ended, then calls `before_end`, then destroys the
  /// UCX worker and context. Not on the loop.
  void stop(const std::function<void()>& before_end);

  // On the loop.

  ucp_worker_h handle() const { return worker_.get(); }
  /// Makes an endpoint for the connection; `params` identifies the peer. Returns UCS_OK, or UCX's error.
  ucs_status_t open(ucp_ep_params_t params, const std::shared_ptr<UcxConnection>& connection, ucp_ep_h& endpoint);
  /// Refuses a connection request of a peer. May be called inside a UCX callback.
  void refuse(ucp_conn_request_h request);
  /// Closes the endpoint; unfinished sends fail. Must not be called inside a UCX callback.
  void close(ucp_ep_h endpoint);
  /// Calls connection->release() after kFarewell. This side has already closed the connection.
  void releaseLater(std::shared_ptr<UcxConnection> connection);
  std::vector<std::shared_ptr<UcxConnection>> connections() const;

 private:
  using Context = std::unique_ptr<ucp_context, decltype(Libucp::ucp_cleanup)>;
  using Handle = std::unique_ptr<ucp_worker, decltype(Libucp::ucp_worker_destroy)>;
  using TimePoint = std::chrono::steady_clock::time_point;

  Context makeContext() const;
  Handle makeWorker() const;
  int eventDescriptor() const;
  UcxConnection* connectionOf(ucp_ep_h endpoint) const;

  // Called by UCX, on the loop.
  template <PartKind kKind>
  static ucs_status_t onMessage(
      void* self, const void* header, size_t header_bytes, void* data, size_t bytes, const ucp_am_recv_param_t* param);
  static void onError(void* self, ucp_ep_h endpoint, ucs_status_t status);

  // On the loop.
  void run();
  void runPosted();
  bool hasPosted();
  void releaseOverdue();
  void sleep();

  // Made by the constructor, destroyed by stop().
  Context context_;
  Handle worker_;
  const int event_descriptor_;

  // On the loop only.
  std::unordered_map<ucp_ep_h, std::shared_ptr<UcxConnection>> connections_;
  size_t closing_ = 0;                                                           ///< endpoints that UCX is closing
  std::deque<std::pair<TimePoint, std::shared_ptr<UcxConnection>>> to_release_;  ///< earliest first
  bool stopping_ = false;

  // Guarded by mutex_.
  Mutex mutex_;
  std::vector<std::function<void()>> posted_ TORCHRPC_GUARDED_BY(mutex_);

  std::thread thread_;  ///< the last member, because the thread uses the others
};

/// Listens on a port. To be used on the loop.
class UcxListener {
 public:
  /// Called inside a UCX callback for each connection request. Passes it to UcxWorker::open() or refuse().
  using OnRequest = std::function<void(ucp_conn_request_h)>;

  /// Throws Error(kRendezvous).
  UcxListener(UcxWorker& worker, const UcxAddress& address, OnRequest on_request);
  ~UcxListener();
  UcxListener(const UcxListener&) = delete;
  UcxListener& operator=(const UcxListener&) = delete;

  /// Returns the address, with the port that the system chose.
  UcxAddress address() const;
  /// Returns the address of the peer that sent the request, e.g. "10.0.0.1:4242".
  std::string peerOf(ucp_conn_request_h request) const;

 private:
  static void onRequest(ucp_conn_request_h request, void* self);

  UcxWorker& worker_;
  const OnRequest on_request_;
  ucp_listener_h listener_ = nullptr;
};

}  // namespace torchrpc::ucx
