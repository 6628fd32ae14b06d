#pragma once

// A UCX endpoint as a Connection.
//
// Threads: Note [One thread for a worker]. "On the loop" means on that thread.

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "transport/frame_memory.h"
#include "transport/transport.h"
#include "transport/ucx/worker.h"

namespace torchrpc::ucx {

class UcxConnection : public Connection, public std::enable_shared_from_this<UcxConnection> {
 public:
  struct Peer {
    std::string name;   ///< empty if unknown
    std::string route;  ///< for error texts, e.g. "10.0.0.1:4242"
  };

  UcxConnection(std::shared_ptr<UcxWorker> worker, Peer peer);

  void send(Frame&& frame, SentHandler&& done) override;
  void close() override;
  std::string describe() const override;

  // On the loop.

  /// Makes the endpoint for `params`; called once. The caller has called Callbacks::begin() for the handler; the
  /// matching end() follows onClosed.
  void start(std::shared_ptr<ConnectionHandler> handler, const ucp_ep_params_t& params);
  /// Called instead of start() for a refused connection. Frames that the acceptor has sent on it fail.
  void refuse();
  /// Does the work of close() on the loop.
  void closeHere();
  /// Posts a task that closes the endpoint. Idempotent.
  void release();
  /// A message has arrived. `data` points to its bytes or, for a rendezvous, to UCX's descriptor of bytes that are
  /// still at the peer. Returns the result of UCX's callback: UCS_INPROGRESS if this object keeps the descriptor.
  ucs_status_t onPart(PartKind kind, std::string_view header, void* data, size_t bytes, bool rendezvous) noexcept;
  /// The endpoint has failed.
  void onError(ucs_status_t status) noexcept;

 private:
  /// Owns a frame's memory until UCX does not need it.
  struct Outgoing {
    Frame frame;
    SentHandler done;
    size_t next_part = 0;   ///< 0: the head; then the segments
    size_t unfinished = 1;  ///< parts that UCX has not finished, and 1 while the frame is in queue_
    Status error{};
  };
  static constexpr size_t kHeaderBytes = 12;
  struct SentPart {
    std::shared_ptr<UcxConnection> connection;  ///< the target of UCX's callback
    std::shared_ptr<Outgoing> frame;            ///< null for the end message
    uint64_t number = 0;
    char header[kHeaderBytes] = {};
  };
  struct Message {
    PartKind kind;
    uint32_t segments;  ///< of a head: the number of segments that follow
    void* data;         ///< the bytes or, if they are still at the peer, UCX's descriptor
    size_t bytes;
    bool is_rendezvous;  ///< the bytes are still at the peer
    std::string copy{};  ///< of the bytes, while the message is in early_
  };
  struct IncomingPart {
    PartKind kind;
    uint32_t segments = 0;  ///< of a head: the number of segments that follow
    std::string head{};     ///< the memory of a head
    Segment segment{};      ///< the memory of a segment
    size_t bytes = 0;
    void* rendezvous = nullptr;  ///< UCX's descriptor, if the data is still at the peer
  };

  // On the loop.
  void enqueue(std::shared_ptr<Outgoing> frame);
  void sendQueued();
  void sendPart(PartKind kind, uint32_t segments, const void* data, size_t bytes, std::shared_ptr<Outgoing> frame);
  void onSent(uint64_t number, ucs_status_t status);
  void finishPart(Outgoing& frame, const Status& error);

  /// Checks the message that is next in order: returns an error if it is malformed or exceeds the limits.
  Status check(const Message& message);
  /// Puts the message that is next in order into incoming_. Returns false if the connection has failed instead.
  bool accept(const Message& message);
  bool keep(uint64_t number, Message message);
  /// Allocates the memory of the part and returns it. Throws the exceptions of the allocators.
  static char* allocate(IncomingPart& part);
  void takeParts();
  bool receiveFront();
  void onReceived(ucs_status_t status);
  void takeFront();

  void dropIncoming();
  void finish(const Error& reason);
  /// finish() and release().
  void fail(const Error& reason);
  Error lost(const std::string& reason) const;
  Error lost(ucs_status_t status) const;
  Error closedHere() const;

  // Constant after construction.
  const std::shared_ptr<UcxWorker> worker_;
  const Peer peer_;

  std::atomic<bool> closed_here_{false};

  // On the loop only.
  ucp_ep_h endpoint_ = nullptr;                 ///< null before start() and after release()
  std::shared_ptr<ConnectionHandler> handler_;  ///< from start() to finish()
  std::optional<Error> reason_;                 ///< from finish() on

  std::deque<std::shared_ptr<Outgoing>> queue_;  ///< frames of which a part has not been sent
  std::map<uint64_t, SentPart> sent_;            ///< by number: parts whose memory UCX needs
  uint64_t next_sent_ = 0;                       ///< the number of the next part

  std::deque<IncomingPart> incoming_;         ///< parts that wait, in order
  std::map<uint64_t, Message> early_;         ///< by number: messages that have overtaken earlier ones
  uint64_t next_received_ = 0;                ///< the number of the next part
  uint32_t announced_segments_ = 0;           ///< segments of the latest frame that have not arrived
  std::optional<FrameSize> announced_bytes_;  ///< size of that frame's parts that have arrived
  Frame frame_;                               ///< the frame to which takeFront() adds parts
  uint32_t missing_segments_ = 0;             ///< segments that frame_ lacks
  std::shared_ptr<UcxConnection> receiving_;  ///< this object, while UCX writes to the memory of the front part
};

}  // namespace torchrpc::ucx
