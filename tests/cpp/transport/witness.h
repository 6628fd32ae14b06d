#pragma once

// What the tests of transports share: a ledger of everything a transport has promised to call, handlers and senders
// that write into it, and a pair of transports that, at its end, fails the test for a promise broken: a callback
// dropped unheard, called twice, called at once with another, or called too late.

#include <catch2/catch.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/frame_memory.h"
#include "transport/transport.h"

namespace torchrpc::test {

class Ledger {
 public:
  /// Runs `note` under the lock and wakes whoever waits.
  template <typename F>
  void write(F note) {
    std::lock_guard lock(mutex_);
    note();
    changed_.notify_all();
  }

  template <typename F>
  auto read(F look) {
    std::lock_guard lock(mutex_);
    return look();
  }

  /// Waits until `condition`, looked at under the lock, holds: true. A minute is never enough for luck.
  template <typename F>
  bool await(F condition) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(60), condition);
  }

  void complain(const std::string& what) {
    write([&] { complaints.push_back(what); });
  }

  // Under the lock.
  std::vector<std::string> complaints;
  int promised = 0;  ///< callbacks that must come: one for each send, one onClosed for each handler
  int kept = 0;
  bool over = false;  ///< nothing may be called any more

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
};

/// A handler that keeps what it hears.
class Witness : public ConnectionHandler {
 public:
  Witness(Ledger& ledger, const Transport& transport) : ledger_(ledger), transport_(transport) {
    ledger_.write([&] { ++ledger_.promised; });
  }

  void onFrame(Frame frame) override {
    Visit visit(*this, "onFrame");
    if (hook) hook(frame);
    ledger_.write([&] {
      if (reason_) ledger_.complaints.emplace_back("onFrame after onClosed");
      frames_.push_back(std::move(frame));
    });
  }
  void onClosed(const Error& reason) override {
    Visit visit(*this, "onClosed");
    if (closed_hook) closed_hook();
    ledger_.write([&] {
      if (reason_) ledger_.complaints.emplace_back("onClosed twice");
      reason_ = reason;
      ++ledger_.kept;
    });
  }

  bool awaitFrames(size_t count) {
    return ledger_.await([&] { return frames_.size() >= count || reason_; }) && frameCount() >= count;
  }
  size_t frameCount() {
    return ledger_.read([&] { return frames_.size(); });
  }
  Frame takeFrame() {
    REQUIRE(awaitFrames(1));
    return ledger_.read([&] {
      auto frame = std::move(frames_.front());
      frames_.pop_front();
      return frame;
    });
  }
  Error awaitClosed() {
    REQUIRE(ledger_.await([&] { return reason_.has_value(); }));
    return ledger_.read([&] { return *reason_; });
  }

  // Set before the connection is made.
  std::function<void(Frame&)> hook;
  std::function<void()> closed_hook;

 private:
  /// What holds for every call.
  struct Visit {
    Visit(Witness& witness, const char* what) : witness(witness) {
      if (witness.busy_.exchange(true))
        witness.ledger_.complain(std::string(what) + " while another call is under way");
      if (!witness.transport_.inLoop()) witness.ledger_.complain(std::string(what) + " not in the loop");
      if (witness.ledger_.read([&] { return witness.ledger_.over; })) {
        witness.ledger_.complain(std::string(what) + " after close()");
      }
    }
    ~Visit() { witness.busy_ = false; }
    Witness& witness;
  };

  Ledger& ledger_;
  const Transport& transport_;
  std::atomic<bool> busy_{false};
  std::deque<Frame> frames_;
  std::optional<Error> reason_;
};

/// What became of one send.
struct Sent {
  bool done = false;
  Status error;
};

/// Two transports of a kind, `b` listening. A kind has one function, make(limits), and may have members.
template <typename TKind>
class Pair {
 public:
  explicit Pair(Limits a_limits = {}, Limits b_limits = {}) : a(kind_.make(a_limits)), b(kind_.make(b_limits)) {
    address = b->listen([this](std::shared_ptr<Connection> connection) -> std::shared_ptr<ConnectionHandler> {
      if (refuse) return nullptr;
      auto witness = std::make_shared<Witness>(ledger, *b);
      if (on_accept) on_accept(connection, *witness);
      ledger.write([&] { accepted_.push_back({connection, witness}); });
      return witness;
    });
  }
  ~Pair() {
    close();
    for (const auto& complaint : ledger.complaints) FAIL_CHECK(complaint);
    CHECK(ledger.kept == ledger.promised);
  }

  void close() {
    a->close();
    b->close();
    ledger.write([&] { ledger.over = true; });
  }

  std::shared_ptr<Witness> witness() { return std::make_shared<Witness>(ledger, *a); }
  std::shared_ptr<Connection> connect(const std::shared_ptr<Witness>& witness) {
    return a->connect(address, "bob", witness);
  }

  struct Accepted {
    std::shared_ptr<Connection> connection;
    std::shared_ptr<Witness> witness;
  };
  Accepted accepted(size_t index = 0) {
    REQUIRE(ledger.await([&] { return accepted_.size() > index; }));
    return ledger.read([&] { return accepted_[index]; });
  }

  std::shared_ptr<Sent> send(Connection& connection, Frame frame) {
    auto sent = std::make_shared<Sent>();
    ledger.write([&] { ++ledger.promised; });
    connection.send(std::move(frame), [this, sent](Status error) {
      ledger.write([&] {
        if (sent->done) ledger.complaints.emplace_back("a send completed twice");
        sent->done = true;
        sent->error = std::move(error);
        ++ledger.kept;
      });
    });
    return sent;
  }
  Status outcome(const std::shared_ptr<Sent>& sent) {
    REQUIRE(ledger.await([&] { return sent->done; }));
    return ledger.read([&] { return sent->error; });
  }

 private:
  TKind kind_;

 public:
  Ledger ledger;
  std::unique_ptr<Transport> a, b;
  std::string address;
  // Set before anything connects.
  bool refuse = false;
  std::function<void(const std::shared_ptr<Connection>&, Witness&)> on_accept;

 private:
  std::vector<Accepted> accepted_;  // guarded by the ledger
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
