#pragma once

// A TensorPipe pipe as a Connection, and the state that the connections of a transport share.
//
// Threads: TensorPipe runs the callbacks of a context's pipes one at a time, on one of its threads or on a thread that
// calls into it. "On the loop" below means in such a callback.

#include <tensorpipe/tensorpipe.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "transport/callbacks.h"
#include "transport/disposal.h"
#include "transport/transport.h"

namespace torchrpc {

/// The state that a transport and its connections share. It outlives both.
struct TensorPipeShared {
  explicit TensorPipeShared(Limits limits) : limits(limits) {}
  const Limits limits;
  Callbacks callbacks;
  Disposal disposal;
};

/// Returns TensorPipe's error text without the source location.
std::string reasonOf(const tensorpipe::Error& error);

class TensorPipeConnection : public Connection, public std::enable_shared_from_this<TensorPipeConnection> {
 public:
  struct Peer {
    std::string name;       ///< empty if unknown
    std::string route;      ///< for error texts, e.g. "shm://83cc1"
    bool channels = false;  ///< both sides have channels; a tensor would crash a peer that has none
  };

  TensorPipeConnection(std::shared_ptr<TensorPipeShared> shared, std::shared_ptr<tensorpipe::Pipe> pipe, Peer peer);

  /// Starts to read; called once. The caller has called Callbacks::begin() for the handler; the matching end() follows
  /// onClosed.
  void start(std::shared_ptr<ConnectionHandler> handler);

  void send(Frame&& frame, SentHandler&& done) override;
  void close() override;
  std::string describe() const override;

  /// Ends the connection if the peer has not finished TensorPipe's handshake although a frame waits for it. Any thread.
  void requireHandshake();

 private:
  struct Outgoing;

  // On the loop.
  void readNext();
  void onDescriptor(const tensorpipe::Error& error, tensorpipe::Descriptor descriptor) noexcept;
  void onBody(const tensorpipe::Error& error, Frame& frame) noexcept;
  void onSent(const tensorpipe::Error& error, Outgoing& outgoing) noexcept;
  void finish(const Error& reason);
  void onHandshakeFinished();

  Error lost(const std::string& reason) const;
  Error closeReason(const tensorpipe::Error& error) const;

  // Constant after construction.
  const std::shared_ptr<TensorPipeShared> shared_;
  const std::shared_ptr<tensorpipe::Pipe> pipe_;
  const Peer peer_;

  std::atomic<bool> closed_here_{false};
  /// What is known of TensorPipe's handshake with the peer.
  enum class Handshake {
    kUnknown,   ///< no frame has been sent or received
    kAwaited,   ///< the first frame waits for it
    kFinished,  ///< a frame has been written, or has arrived
    kLate,      ///< it was awaited when requireHandshake() was called
  };
  std::atomic<Handshake> handshake_{Handshake::kUnknown};

  // On the loop only, after start().
  std::shared_ptr<ConnectionHandler> handler_;
};

}  // namespace torchrpc
