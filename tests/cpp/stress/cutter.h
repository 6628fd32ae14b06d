#pragma once

// A transport whose connections can be cut: for the stress program. Which one goes is by chance.
// Threads: any.

#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace torchrpc::test {

class Cutter final : public Transport {
 public:
  explicit Cutter(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}

  /// Closes one connection that was opened or accepted here, if there is one.
  void cut(std::minstd_rand& random) {
    std::shared_ptr<Connection> unlucky;
    {
      std::lock_guard lock(mutex_);
      std::erase_if(connections_, [](const auto& connection) { return connection.expired(); });
      if (!connections_.empty()) unlucky = connections_[random() % connections_.size()].lock();
    }
    if (unlucky) unlucky->close();
  }

  std::string listen(Acceptor acceptor) override {
    return inner_->listen([this, acceptor = std::move(acceptor)](std::shared_ptr<Connection> connection) {
      note(connection);
      return acceptor(std::move(connection));
    });
  }
  std::shared_ptr<Connection> connect(
      const std::string& address, const std::string& peer_name, std::shared_ptr<ConnectionHandler> handler) override {
    auto connection = inner_->connect(address, peer_name, std::move(handler));
    note(connection);
    return connection;
  }
  void close() override { inner_->close(); }
  bool inLoop() const override { return inner_->inLoop(); }
  void poll(const std::function<bool()>& done) override { inner_->poll(done); }
  void sleep(const std::function<bool()>& done, FutexWaiter& waiter, TimePoint latest, bool preemptible) override {
    inner_->sleep(done, waiter, latest, preemptible);
  }
  std::string describe() const override { return inner_->describe(); }

 private:
  void note(const std::shared_ptr<Connection>& connection) {
    std::lock_guard lock(mutex_);
    connections_.push_back(connection);
  }

  const std::unique_ptr<Transport> inner_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<Connection>> connections_;
};

}  // namespace torchrpc::test
