#pragma once

// Checks that transports call back as their contract says. A log counts the callbacks that a transport owes and those
// that it has made; handlers (Witness) and senders write to it. At its end, a Pair of transports fails the test for
// every violation: a callback that was never made, was made twice, at the same time as another, or after close().

#include <catch2/catch.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "transport/frame_memory.h"
#include "transport/transport.h"

namespace torchrpc::test {

class CallbackLog {
 public:
  /// Runs `change` under the lock, and wakes the threads in await().
  template <typename F>
  void write(F change) {
    std::lock_guard lock(mutex_);
    change();
    changed_.notify_all();
  }

  template <typename F>
  auto read(F get) {
    std::lock_guard lock(mutex_);
    return get();
  }

  /// Waits until `condition`, called under the lock, is true. False after a minute, which no correct transport needs.
  template <typename F>
  bool await(F condition) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(60), condition);
  }

  void addViolation(const std::string& text) {
    write([&] { violations.push_back(text); });
  }

  // Under the lock.
  std::vector<std::string> violations;
  int expected = 0;     ///< callbacks that must be made: one for each send, one onClosed for each handler
  int made = 0;         ///< of these
  bool closed = false;  ///< no callback may be made any more

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
};

/// A handler that records its calls.
class Witness : public ConnectionHandler {
 public:
  Witness(CallbackLog& log, const Transport& transport) : log_(log), transport_(transport) {
    log_.write([&] { ++log_.expected; });
  }

  void onIdentity(const PeerIdentity& identity) override {
    Visit visit(*this, "onIdentity");
    log_.write([&] {
      if (frames_.empty()) identity_ = identity;
    });
  }
  void onFrame(Frame&& frame) override {
    Visit visit(*this, "onFrame");
    if (hook) hook(frame);
    log_.write([&] {
      if (reason_) log_.violations.emplace_back("onFrame after onClosed");
      frames_.push_back(std::move(frame));
    });
  }
  void onClosed(const Error& reason) override {
    Visit visit(*this, "onClosed");
    if (closed_hook) closed_hook();
    log_.write([&] {
      if (reason_) log_.violations.emplace_back("onClosed twice");
      reason_ = reason;
      ++log_.made;
    });
  }

  bool awaitFrames(size_t count) {
    return log_.await([&] { return frames_.size() >= count || reason_; }) && frameCount() >= count;
  }
  size_t frameCount() {
    return log_.read([&] { return frames_.size(); });
  }
  Frame takeFrame() {
    const bool has_frame = awaitFrames(1);
    INFO(log_.read([&] { return reason_ ? reason_->text() : "the connection is open"; }));
    REQUIRE(has_frame);
    return log_.read([&] {
      auto frame = std::move(frames_.front());
      frames_.pop_front();
      return frame;
    });
  }
  /// What the peer had proved when its first frame came.
  std::optional<PeerIdentity> identityBeforeFrames() {
    return log_.read([&] { return identity_; });
  }
  Error awaitClosed() {
    REQUIRE(log_.await([&] { return reason_.has_value(); }));
    return log_.read([&] { return *reason_; });
  }

  // Set before the connection is made.
  std::function<void(Frame&)> hook;
  std::function<void()> closed_hook;

 private:
  /// Checks what holds for every callback, during the callback.
  struct Visit {
    Visit(Witness& witness, const char* callback) : witness(witness) {
      if (witness.busy_.exchange(true))
        witness.log_.addViolation(std::string(callback) + " while another call is under way");
      if (!witness.transport_.inLoop()) witness.log_.addViolation(std::string(callback) + " not in the loop");
      if (witness.log_.read([&] { return witness.log_.closed; })) {
        witness.log_.addViolation(std::string(callback) + " after close()");
      }
    }
    ~Visit() { witness.busy_ = false; }
    Witness& witness;
  };

  CallbackLog& log_;
  const Transport& transport_;
  std::atomic<bool> busy_{false};
  std::deque<Frame> frames_;
  std::optional<PeerIdentity> identity_;
  std::optional<Error> reason_;
};

/// The outcome of one send.
struct Sent {
  bool done = false;
  Status error;
};

/// Two transports of one kind; `b` listens. TKind has the function make(limits) and may have members.
template <typename TKind>
class Pair {
 public:
  explicit Pair(Limits a_limits = {}, Limits b_limits = {}) : a(kind_.make(a_limits)), b(kind_.make(b_limits)) {
    address = b->listen([this](std::shared_ptr<Connection> connection) -> std::shared_ptr<ConnectionHandler> {
      if (refuse) return nullptr;
      auto witness = std::make_shared<Witness>(log, *b);
      if (on_accept) on_accept(connection, *witness);
      log.write([&] { accepted_.push_back({connection, witness}); });
      return witness;
    });
  }
  ~Pair() {
    close();
    for (const auto& violation : log.violations) FAIL_CHECK(violation);
    CHECK(log.made == log.expected);
  }

  void close() {
    a->close();
    b->close();
    log.write([&] { log.closed = true; });
  }

  std::shared_ptr<Witness> witness() { return std::make_shared<Witness>(log, *a); }
  std::shared_ptr<Connection> connect(const std::shared_ptr<Witness>& witness) {
    return a->connect(address, "bob", witness);
  }

  struct Accepted {
    std::shared_ptr<Connection> connection;
    std::shared_ptr<Witness> witness;
  };
  Accepted accepted(size_t index = 0) {
    REQUIRE(log.await([&] { return accepted_.size() > index; }));
    return log.read([&] { return accepted_[index]; });
  }

  std::shared_ptr<Sent> send(Connection& connection, Frame frame) {
    auto sent = std::make_shared<Sent>();
    log.write([&] { ++log.expected; });
    connection.send(std::move(frame), [this, sent](Status error) {
      log.write([&] {
        if (sent->done) log.violations.emplace_back("a send completed twice");
        sent->done = true;
        sent->error = std::move(error);
        ++log.made;
      });
    });
    return sent;
  }
  Status outcome(const std::shared_ptr<Sent>& sent) {
    REQUIRE(log.await([&] { return sent->done; }));
    return log.read([&] { return sent->error; });
  }

 private:
  TKind kind_;

 public:
  CallbackLog log;
  std::unique_ptr<Transport> a, b;
  std::string address;
  // Set before anything connects.
  bool refuse = false;
  std::function<void(const std::shared_ptr<Connection>&, Witness&)> on_accept;

 private:
  std::vector<Accepted> accepted_;  // guarded by the log
};

inline Frame headOnly(std::string head) { return {std::move(head), {}}; }

inline Segment filled(size_t bytes, char value) {
  auto segment = newSegment(bytes);
  if (bytes > 0) std::memset(segment.mutableData(), value, bytes);
  return segment;
}

inline bool isFilled(const Segment& segment, size_t bytes, char value) {
  const auto* data = static_cast<const char*>(segment.data());
  return segment.bytes == bytes && (bytes == 0 || (data[0] == value && std::memcmp(data, data + 1, bytes - 1) == 0));
}

}  // namespace torchrpc::test
