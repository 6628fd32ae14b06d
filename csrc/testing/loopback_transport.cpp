// The network is a table of stations; a station is the lasting part of a transport: its loop and its connections. A
// connection is two ends, each of which acts on the loop of its own station only. All that happens to an end is a task
// on that loop, so the order of tasks is the order of events: frames sent before a close arrive before it.

#include "testing/loopback_transport.h"

#include <atomic>
#include <charconv>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "base/executor/task_thread.h"
#include "base/sync/mutex.h"
#include "transport/frame_memory.h"

namespace torchrpc {

namespace {

constexpr std::string_view kScheme = "loopback:";

class LoopbackEnd;

/// What peers may still refer to when the transport is gone.
struct Station {
  explicit Station(Limits limits) : limits(limits) {}

  // Constant after construction (acceptor: once the station is on the network).
  const Limits limits;
  Transport::Acceptor acceptor;
  TaskThread loop;

  // Guarded by mutex.
  Mutex mutex;
  bool closed TORCHRPC_GUARDED_BY(mutex) = false;
  std::unordered_set<std::shared_ptr<LoopbackEnd>> ends TORCHRPC_GUARDED_BY(mutex);
};

void copySegments(Frame& frame) {
  for (auto& segment : frame.segments) {
    auto copy = newSegment(segment.bytes);
    if (segment.bytes > 0) std::memcpy(copy.mutableData(), segment.data(), segment.bytes);
    segment = std::move(copy);
  }
}

class LoopbackEnd : public Connection, public std::enable_shared_from_this<LoopbackEnd> {
 public:
  LoopbackEnd(std::shared_ptr<Station> station, std::string peer, std::shared_ptr<ConnectionHandler> handler)
      : station_(std::move(station)), peer_(std::move(peer)), handler_(std::move(handler)) {}

  /// Before either end is known to anyone else.
  static void join(const std::shared_ptr<LoopbackEnd>& one, const std::shared_ptr<LoopbackEnd>& other) {
    one->other_ = other;
    other->other_ = one;
  }

  /// Keeps the end alive until it has ended. False if the station is closed.
  bool enroll() {
    MutexLock lock(station_->mutex);
    if (station_->closed) return false;
    station_->ends.insert(shared_from_this());
    return true;
  }

  void send(Frame frame, std::function<void(Status)> done) override { done(trySend(std::move(frame))); }
  void close() override { end({ErrorCode::kShutdown, "the connection to " + peer_ + " was closed from this side"}); }
  std::string describe() const override { return "loopback connection to " + peer_; }

  void end(Error reason) {
    open_ = false;
    station_->loop.post([self = shared_from_this(), reason = std::move(reason)] { self->finish(reason); });
  }

  /// On the loop, first of all.
  void accept() {
    if (enroll()) handler_ = station_->acceptor(shared_from_this());
    if (!handler_) finish({ErrorCode::kShutdown, "nobody accepted it"});
  }

 private:
  Status trySend(Frame frame) {
    if (auto error = checkFrame(frame, station_->limits)) return error;
    auto other = open_ ? other_.lock() : nullptr;
    if (other) {
      copySegments(frame);  // the head was moved in and is nobody else's
      auto deliver = [other, frame = std::move(frame)]() mutable { other->onFrame(std::move(frame)); };
      if (other->station_->loop.post(std::move(deliver))) return std::nullopt;
    }
    return Error(ErrorCode::kWorkerLost, "the connection to " + peer_ + " is closed", peer_);
  }

  // On the loop.
  void onFrame(Frame frame) {
    if (!handler_) return;
    if (auto error = checkFrame(frame, station_->limits)) return finish(*error);
    handler_->onFrame(std::move(frame));
  }
  void finish(const Error& reason) {
    if (std::exchange(finished_, true)) return;
    open_ = false;
    {
      MutexLock lock(station_->mutex);
      station_->ends.erase(shared_from_this());
    }
    if (auto handler = std::move(handler_)) handler->onClosed(reason);
    if (auto other = other_.lock()) {
      other->end(
          {ErrorCode::kWorkerLost, "the connection to " + other->peer_ + " was closed from there", other->peer_});
    }
  }

  // Constant after construction (other_: after join).
  const std::shared_ptr<Station> station_;
  const std::string peer_;
  std::weak_ptr<LoopbackEnd> other_;

  std::atomic<bool> open_{true};

  // On the loop only, once constructed.
  std::shared_ptr<ConnectionHandler> handler_;
  bool finished_ = false;
};

}  // namespace

class LoopbackNetwork {
 public:
  uint64_t add(std::shared_ptr<Station> station) {
    MutexLock lock(mutex_);
    stations_[++last_] = std::move(station);
    return last_;
  }
  void remove(uint64_t number) {
    std::shared_ptr<Station> dropped;  // destroyed after the lock
    MutexLock lock(mutex_);
    auto found = stations_.find(number);
    if (found == stations_.end()) return;
    dropped = std::move(found->second);
    stations_.erase(found);
  }
  std::shared_ptr<Station> find(uint64_t number) {
    MutexLock lock(mutex_);
    auto found = stations_.find(number);
    return found == stations_.end() ? nullptr : found->second;
  }

 private:
  // Guarded by mutex_.
  Mutex mutex_;
  uint64_t last_ TORCHRPC_GUARDED_BY(mutex_) = 0;
  std::unordered_map<uint64_t, std::shared_ptr<Station>> stations_ TORCHRPC_GUARDED_BY(mutex_);
};

namespace {

uint64_t parseAddress(const std::string& address) {
  uint64_t number = 0;
  std::string_view text = address;
  if (text.starts_with(kScheme)) {
    text.remove_prefix(kScheme.size());
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error == std::errc() && end == text.data() + text.size()) return number;
  }
  throw Error(
      ErrorCode::kInvalidArgument, "'" + address + "' is not the address of a loopback transport (loopback:<n>)");
}

class LoopbackTransport : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<LoopbackNetwork> network, Limits limits)
      : network_(std::move(network)), station_(std::make_shared<Station>(limits)) {}
  ~LoopbackTransport() override { close(); }

  std::string listen(Acceptor acceptor) override {
    station_->acceptor = std::move(acceptor);
    number_ = network_->add(station_);
    return std::string(kScheme) + std::to_string(number_);
  }

  std::shared_ptr<Connection> connect(
      const std::string& address, const std::string& peer_name, std::shared_ptr<ConnectionHandler> handler) override {
    const auto number = parseAddress(address);
    auto near = std::make_shared<LoopbackEnd>(station_, peer_name, std::move(handler));
    if (!near->enroll())
      throw Error(ErrorCode::kShutdown, "cannot connect to " + peer_name + ": the transport is closed");
    auto station = network_->find(number);
    auto far = station ? std::make_shared<LoopbackEnd>(station, "the peer at " + describe(), nullptr) : nullptr;
    if (far) LoopbackEnd::join(near, far);
    if (!far || !station->loop.post([far] { far->accept(); })) {
      near->end({ErrorCode::kWorkerLost, "nobody listens at " + address + " (" + peer_name + ")", peer_name});
    }
    return near;
  }

  void close() override {
    std::call_once(close_once_, [this] {
      network_->remove(number_);
      decltype(station_->ends) ends;
      {
        MutexLock lock(station_->mutex);
        station_->closed = true;
        ends = station_->ends;
      }
      for (const auto& end : ends) end->close();
      station_->loop.stop();
    });
  }

  bool inLoop() const override { return station_->loop.inLoop(); }
  std::string describe() const override { return std::string(kScheme) + (number_ ? std::to_string(number_) : "-"); }

 private:
  // Constant after construction (number_: after listen()).
  const std::shared_ptr<LoopbackNetwork> network_;
  const std::shared_ptr<Station> station_;
  std::atomic<uint64_t> number_{0};  // 0: not listening

  std::once_flag close_once_;
};

}  // namespace

std::shared_ptr<LoopbackNetwork> makeLoopbackNetwork() { return std::make_shared<LoopbackNetwork>(); }

std::unique_ptr<Transport> makeLoopbackTransport(std::shared_ptr<LoopbackNetwork> network, Limits limits) {
  return std::make_unique<LoopbackTransport>(std::move(network), limits);
}

}  // namespace torchrpc
