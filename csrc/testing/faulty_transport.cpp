// Faults are injected into sends only; arriving frames reach the handlers unchanged. A delayed send is kept in a table.
// Either the timer or close() removes it from the table and completes it.

#include "testing/faulty_transport.h"

#include <unordered_map>
#include <utility>

#include "base/sync/mutex.h"

namespace torchrpc {

namespace {

/// A frame for the inner connection.
struct PendingSend {
  std::shared_ptr<Connection> connection;
  Frame frame;
  SentHandler done;
  Fault::Action action;

  void run() {
    switch (action) {
      case Fault::Action::kDeliver: return connection->send(std::move(frame), std::move(done));
      case Fault::Action::kFail:
        return done(Error(ErrorCode::kWorkerLost, "a fault was injected into " + connection->describe()));
      case Fault::Action::kDrop: return done(std::nullopt);
      case Fault::Action::kRepeat: {
        // The second send starts after the first has completed: when `done` is called, neither needs the memory.
        const auto to = connection;
        auto first = frame;
        return to->send(std::move(first), [again = std::move(*this)](Status error) mutable {
          if (error) return again.done(std::move(error));
          again.connection->send(std::move(again.frame), std::move(again.done));
        });
      }
    }
  }
};

/// Shared by the connections. Lives until the last of them and the last task of the timer are destroyed.
class Faults : public std::enable_shared_from_this<Faults> {
 public:
  Faults(FaultPolicy policy, Timer& timer) : policy_(std::move(policy)), timer_(timer) {}

  void send(PendingSend send, const std::string& peer_name) {
    const auto fault = policy_(peekFrame(send.frame.head).value_or(FrameInfo{}), peer_name);
    send.action = fault.action;
    if (fault.delay <= Duration::zero()) return send.run();
    if (const auto number = add(send)) {
      timer_.after(fault.delay, [self = shared_from_this(), number] { self->fire(number); });
    } else {
      send.done(Error(ErrorCode::kShutdown, send.connection->describe() + " was closed from this side"));
    }
  }

  /// Fails the delayed sends, and waits until the timer's thread has finished the sends that it has removed.
  void close() {
    decltype(delayed_) dropped;
    {
      MutexLock lock(mutex_);
      closed_ = true;
      dropped.swap(delayed_);
      while (firing_ > 0) idle_.wait(lock);
    }
    for (auto& [number, send] : dropped) {
      send.done(Error(ErrorCode::kShutdown, send.connection->describe() + " was closed from this side"));
    }
  }

 private:
  /// Returns the number of the delayed send, 0 after close().
  uint64_t add(PendingSend& send) {
    MutexLock lock(mutex_);
    if (closed_) return 0;
    delayed_.emplace(++last_, std::move(send));
    return last_;
  }

  void fire(uint64_t number) {
    decltype(delayed_)::node_type taken;
    {
      MutexLock lock(mutex_);
      taken = delayed_.extract(number);
      if (!taken) return;
      ++firing_;
    }
    taken.mapped().run();
    taken = {};
    MutexLock lock(mutex_);
    if (--firing_ == 0) idle_.notify_all();
  }

  // Constant after construction.
  const FaultPolicy policy_;
  Timer& timer_;

  // Guarded by mutex_.
  Mutex mutex_;
  CondVar idle_;
  bool closed_ TORCHRPC_GUARDED_BY(mutex_) = false;
  size_t firing_ TORCHRPC_GUARDED_BY(mutex_) = 0;
  uint64_t last_ TORCHRPC_GUARDED_BY(mutex_) = 0;
  std::unordered_map<uint64_t, PendingSend> delayed_ TORCHRPC_GUARDED_BY(mutex_);
};

class FaultyConnection : public Connection {
 public:
  FaultyConnection(std::shared_ptr<Faults> faults, std::shared_ptr<Connection> inner, std::string peer_name)
      : faults_(std::move(faults)), inner_(std::move(inner)), peer_name_(std::move(peer_name)) {}

  void send(Frame&& frame, SentHandler&& done) override {
    faults_->send({inner_, std::move(frame), std::move(done), {}}, peer_name_);
  }
  void close() override { inner_->close(); }
  std::string describe() const override { return "faulty " + inner_->describe(); }

 private:
  // Constant after construction.
  const std::shared_ptr<Faults> faults_;
  const std::shared_ptr<Connection> inner_;
  const std::string peer_name_;
};

class FaultyTransport : public Transport {
 public:
  FaultyTransport(std::unique_ptr<Transport> inner, FaultPolicy policy, Timer& timer)
      : inner_(std::move(inner)), faults_(std::make_shared<Faults>(std::move(policy), timer)) {}
  ~FaultyTransport() override { close(); }

  void onRefused(std::function<void(const std::string&, const Error&)> observer) override {
    inner_->onRefused(std::move(observer));
  }
  std::string listen(Acceptor acceptor) override {
    return inner_->listen([acceptor = std::move(acceptor), faults = faults_](std::shared_ptr<Connection> inner) {
      return acceptor(std::make_shared<FaultyConnection>(faults, std::move(inner), ""));
    });
  }
  std::shared_ptr<Connection> connect(
      const std::string& address, const std::string& peer_name, std::shared_ptr<ConnectionHandler> handler) override {
    auto inner = inner_->connect(address, peer_name, std::move(handler));
    return std::make_shared<FaultyConnection>(faults_, std::move(inner), peer_name);
  }
  void close() override {
    faults_->close();
    inner_->close();
  }
  bool inLoop() const override { return inner_->inLoop(); }
  void poll(const std::function<bool()>& done) override { inner_->poll(done); }
  void park(const std::function<bool()>& done, FutexWaiter& waiter, TimePoint deadline, bool preemptible) override {
    inner_->park(done, waiter, deadline, preemptible);
  }
  void afterReading(std::function<void()> done) override { inner_->afterReading(std::move(done)); }
  std::string describe() const override { return "faulty " + inner_->describe(); }
  std::map<std::string, std::string> metrics() const override { return inner_->metrics(); }

 private:
  // Constant after construction.
  const std::unique_ptr<Transport> inner_;
  const std::shared_ptr<Faults> faults_;
};

}  // namespace

std::unique_ptr<Transport> makeFaultyTransport(std::unique_ptr<Transport> inner, FaultPolicy policy, Timer& timer) {
  return std::make_unique<FaultyTransport>(std::move(inner), std::move(policy), timer);
}

}  // namespace torchrpc
