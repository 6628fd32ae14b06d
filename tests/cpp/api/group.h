#pragma once

// Groups of public nodes in one process, which meet at a store in memory.

#include <catch2/catch.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "torchrpc/node.h"

class Group {
 public:
  /// `change` changes the options of each node.
  explicit Group(int size, const std::function<void(torchrpc::NodeOptions&)>& change = [](auto&) {}) : nodes_(size) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    together([&](int rank) {
      torchrpc::NodeOptions options;
      options.name = "worker" + std::to_string(rank);
      options.rank = rank;
      options.world_size = static_cast<int>(nodes_.size());
      options.threads = 2;
      options.timeout = std::chrono::seconds(20);
      options.init_timeout = std::chrono::seconds(20);
      change(options);
      nodes_[rank] = std::make_unique<torchrpc::Node>(options, store);
    });
  }
  torchrpc::Node& operator[](int rank) { return *nodes_.at(rank); }

  /// Runs `act` for each rank, in parallel.
  void together(const std::function<void(int)>& act) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < static_cast<int>(nodes_.size()); ++rank) threads.emplace_back(act, rank);
    for (auto& thread : threads) thread.join();
  }
  void shutdown() {
    together([&](int rank) { nodes_[rank]->shutdown(std::chrono::seconds(20)); });
  }

 private:
  std::vector<std::unique_ptr<torchrpc::Node>> nodes_;
};

/// The Error that `body` throws.
inline torchrpc::Error errorOf(const std::function<void()>& body) {
  try {
    body();
  } catch (const torchrpc::Error& e) {
    return e;
  }
  FAIL("no Error was thrown");
  throw;
}
