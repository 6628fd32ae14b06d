// The RRef layer with real threads, for the thread sanitizer: each node has a loop thread and a pool, several threads
// use each node at the same time, and some messages arrive twice.

#include <catch2/catch.hpp>

#include <deque>
#include <random>
#include <thread>

#include "base/executor/thread_pool.h"
#include "rref/rref_node.h"

using namespace torchrpc;
using namespace torchrpc::testing;

namespace {

/// Counts pending tasks, so that a test can wait until there are none.
class Traffic {
 public:
  void begin() {
    MutexLock lock(mutex_);
    ++pending_;
  }
  void end() {
    MutexLock lock(mutex_);
    if (--pending_ == 0) idle_.notify_all();
  }
  bool waitIdle() {
    MutexLock lock(mutex_);
    return idle_.wait_for(lock, std::chrono::seconds(60), [this]() TORCHRPC_REQUIRES(mutex_) { return pending_ == 0; });
  }

 private:
  Mutex mutex_;
  CondVar idle_;
  int pending_ TORCHRPC_GUARDED_BY(mutex_) = 0;
};

class Loop {
 public:
  explicit Loop(Traffic& traffic) : traffic_(traffic), thread_([this] { run(); }) {}
  ~Loop() {
    {
      MutexLock lock(mutex_);
      closed_ = true;
    }
    filled_.notify_one();
    thread_.join();
  }
  void post(UniqueFunction<void()>&& task) {
    traffic_.begin();
    {
      MutexLock lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    filled_.notify_one();
  }

 private:
  void run() {
    while (true) {
      UniqueFunction<void()> task;
      {
        MutexLock lock(mutex_);
        filled_.wait(lock, [this]() TORCHRPC_REQUIRES(mutex_) { return closed_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
      task = nullptr;
      traffic_.end();
    }
  }

  Traffic& traffic_;
  Mutex mutex_;
  CondVar filled_;
  std::deque<UniqueFunction<void()>> tasks_ TORCHRPC_GUARDED_BY(mutex_);
  bool closed_ TORCHRPC_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

class ThreadedNode : public Messenger {
 public:
  using Nodes = std::vector<std::unique_ptr<ThreadedNode>>;

  ThreadedNode(const Nodes& nodes, WorkerId id, Traffic& traffic)
      : nodes_(nodes),
        self_(info(id)),
        traffic_(traffic),
        pool_({.size = 3, .max_size = 16, .name = "test"}),
        loop_(traffic) {}

  static WorkerInfo info(WorkerId id) { return {"worker" + std::to_string(id), id}; }
  const WorkerInfo& self() const override { return self_; }
  WorkerInfo worker(WorkerId id) const override { return info(id); }
  PeerId peerId(WorkerId id) const override { return {id}; }
  void on(Kind kind, Where, RequestHandler handler) override { handlers_[kind] = std::move(handler); }

  void request(WorkerId to, Message&& message, Duration, ReplyHandler&& handler) override {
    send(to, message, std::make_shared<Once>(std::move(handler)));
  }
  void requestReliably(WorkerId to, Message&& message, ReplyHandler&& handler) override {
    auto once = std::make_shared<Once>(std::move(handler));
    if (repeats_++ % 4 == 0) send(to, message, once);
    send(to, message, once);
  }
  void postAfter(Duration, std::function<void()> task) override { post(std::move(task)); }
  void postToStrand(Task&& task) override { post(std::move(task)); }
  void post(Task&& task) override {
    traffic_.begin();
    pool_.post([this, task = std::move(task)]() mutable {
      task();
      task = nullptr;
      traffic_.end();
    });
  }

 private:
  /// Calls the handler with the first reply, on this node's loop.
  struct Once {
    explicit Once(ReplyHandler handler) : handler(std::move(handler)) {}
    ReplyHandler handler;
  };

  void send(WorkerId to, const Message& message, std::shared_ptr<Once> once) {
    auto& peer = *nodes_.at(static_cast<size_t>(to));
    peer.loop_.post([this, &peer, message, once = std::move(once)]() mutable {
      Responder responder([this, once = std::move(once)](Result<Message> reply) {
        loop_.post([once, reply = std::move(reply)] {
          auto handler = std::exchange(once->handler, nullptr);
          if (handler) handler(Result<Message>(reply));
        });
      });
      peer.handlers_.at(message.kind)({{self_}, std::move(message)}, std::move(responder));
    });
  }

  const Nodes& nodes_;
  const WorkerInfo self_;
  Traffic& traffic_;
  std::map<Kind, RequestHandler> handlers_;  // constant once messages are sent
  std::atomic<int> repeats_{0};
  ThreadPool pool_;
  Loop loop_;
};

/// RRefs that several threads add and remove.
class Shelf {
 public:
  void put(RRefPtr rref) {
    MutexLock lock(mutex_);
    rrefs_.push_back(std::move(rref));
  }
  RRefPtr pick(size_t random) {
    MutexLock lock(mutex_);
    return rrefs_.empty() ? nullptr : rrefs_[random % rrefs_.size()];
  }
  RRefPtr take(size_t random) {
    MutexLock lock(mutex_);
    if (rrefs_.empty()) return nullptr;
    std::swap(rrefs_[random % rrefs_.size()], rrefs_.back());
    auto rref = std::move(rrefs_.back());
    rrefs_.pop_back();
    return rref;
  }

 private:
  Mutex mutex_;
  std::vector<RRefPtr> rrefs_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace

TEST_CASE("threads that use RRefs concurrently lose no value and leak none") {
  constexpr int kNodes = 3;
  constexpr int kThreads = 2;  // a node
  constexpr int kOperations = 300;
  Traffic traffic;
  std::vector<Shelf> shelves(kNodes);
  std::atomic<int> wrong{0};
  std::atomic<int> fetched{0};

  RRefNode::Hooks hooks;
  hooks.function = [&](RRefNode& node, const WorkerInfo&, RRefNode::RRefs args) {
    for (const auto& arg : args) {
      auto user = std::dynamic_pointer_cast<UserRRef>(arg);
      if (user && !user->confirmed()) ++wrong;
      shelves[static_cast<size_t>(node.id())].put(arg);
    }
    return args;
  };
  ThreadedNode::Nodes network;
  for (WorkerId id = 0; id < kNodes; ++id) network.push_back(std::make_unique<ThreadedNode>(network, id, traffic));
  std::vector<std::unique_ptr<RRefNode>> nodes;
  for (const auto& messenger : network) nodes.push_back(std::make_unique<RRefNode>(*messenger, hooks));

  const auto operate = [&](RRefNode& node, uint64_t seed) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    auto& shelf = shelves[static_cast<size_t>(node.id())];
    for (int i = 0; i < kOperations; ++i) {
      const auto what = random() % 10;
      const auto to = static_cast<WorkerId>(random() % kNodes);
      auto rref = what < 9 ? shelf.pick(random()) : shelf.take(random());
      if (what < 3 || !rref) {
        shelf.put(node.remote(to));
      } else if (what < 6) {
        node.call(to, {rref}, [&shelf](Result<RRefNode::RRefs> reply) {
          if (reply.ok()) shelf.put(reply.value().at(0));
        });
      } else if (auto user = std::dynamic_pointer_cast<UserRRef>(rref); user && what < 9) {
        node.fetch(user, [&, expected = static_cast<int64_t>(rref->id().local_id)](Result<int64_t> value) {
          if (!value.ok() || value.value() != expected) ++wrong;
          ++fetched;
        });
      }
      if (random() % 4 < 3) shelf.take(random());  // about as many are removed as added
    }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kNodes * kThreads; ++t) {
    threads.emplace_back([&, t] { operate(*nodes[static_cast<size_t>(t % kNodes)], static_cast<uint64_t>(t) + 1); });
  }
  for (auto& thread : threads) thread.join();
  threads.clear();
  REQUIRE(traffic.waitIdle());
  CHECK(wrong == 0);
  CHECK(fetched > 0);

  std::atomic<int> in_time{0};
  for (const auto& node : nodes) {
    threads.emplace_back([&] { in_time += node->rrefs().deleteAllUsers(std::chrono::seconds(60)); });
  }
  for (auto& thread : threads) thread.join();
  CHECK(in_time == kNodes);
  REQUIRE(traffic.waitIdle());
  for (auto& shelf : shelves) {
    while (shelf.take(0)) {
    }
  }
  for (const auto& node : nodes) {
    const auto info = node->rrefs().debugInfo();
    CHECK(info.owner_rrefs + info.forks + info.pending_users + info.pending_children == 0);
    CHECK(info.number_runs <= 2 * kNodes);
    CHECK(node->rrefs().destroy().empty());
  }
}

TEST_CASE("several threads wait for a value that another thread sets") {
  const std::shared_ptr<GroupMember> member(new GroupMember{{"worker0", 0}, "loopback"});
  for (int round = 0; round < 50; ++round) {
    auto rref = std::make_shared<OwnerRRef>(RRefId{0, 0}, member);
    std::atomic<int> got{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&, i] {
        if (i == 0) rref->whenReady([&](const Result<c10::IValue>& value) { got += value.value().toInt() == 5; });
        got += rref->wait(std::chrono::seconds(30)).toInt() == 5;
      });
    }
    threads.emplace_back([&] { rref->setValue(5); });
    for (auto& thread : threads) thread.join();
    REQUIRE(got == 4);
  }
}
