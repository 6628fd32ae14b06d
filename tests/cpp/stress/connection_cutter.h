#pragma once

// A transport that can close one of its connections, chosen at random: for the stress program.
// Threads: any.

#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "base/sync/mutex.h"
#include "transport/transport.h"

namespace torchrpc::test {

class ConnectionCutter final : public Transport {
 public:
  explicit ConnectionCutter(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}

  /// Closes one of the connections that were opened or accepted here, if there are any.
  void cut(std::minstd_rand& random) {
    std::shared_ptr<Connection> chosen;
    {
      MutexLock lock(mutex_);
      std::erase_if(connections_, [](const auto& connection) { return connection.expired(); });
      if (!connections_.empty()) chosen = connections_[random() % connections_.size()].lock();
    }
    if (chosen) chosen->close();
  }

  std::string listen(Acceptor acceptor) override {
    return inner_->listen([this, acceptor = std::move(acceptor)](std::shared_ptr<Connection> connection) {
      add(connection);
      return acceptor(std::move(connection));
    });
  }
  std::shared_ptr<Connection> connect(
      const std::string& address, const std::string& peer_name, std::shared_ptr<ConnectionHandler> handler) override {
    auto connection = inner_->connect(address, peer_name, std::move(handler));
    add(connection);
    return connection;
  }
  void close() override { inner_->close(); }
  bool inLoop() const override { return inner_->inLoop(); }
  void poll(const std::function<bool()>& done) override { inner_->poll(done); }
  void park(const std::function<bool()>& done, FutexWaiter& waiter, TimePoint deadline, bool preemptible) override {
    inner_->park(done, waiter, deadline, preemptible);
  }
  std::string describe() const override { return inner_->describe(); }

 private:
  void add(const std::shared_ptr<Connection>& connection) {
    MutexLock lock(mutex_);
    connections_.push_back(connection);
  }

  const std::unique_ptr<Transport> inner_;
  Mutex mutex_;
  std::vector<std::weak_ptr<Connection>> connections_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc::test
