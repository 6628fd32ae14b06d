#include "group/store_keeper.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/exception.h"
#include "base/executor/start_thread.h"
#include "base/log.h"
#include "group/rendezvous.h"
#include "group/store_wait.h"

namespace torchrpc {

namespace {

constexpr Duration kDialTime = std::chrono::milliseconds(200);
constexpr auto kPause = std::chrono::milliseconds(50);
constexpr auto kStoreTimeout = std::chrono::seconds(5);
// The process that listened may have been about to end. c10d then goes on dialling for about twice this time. Nothing
// can interrupt that, and stop() waits for it.
constexpr auto kConnectTimeout = std::chrono::seconds(1);

StoreKeeper::Bytes bytesOf(std::string_view text) { return {text.begin(), text.end()}; }

}  // namespace

void StoreKeeper::onStoreLost() {
  std::thread former;  // it has set is_running_ last, so it has ended when it is joined
  {
    MutexLock lock(mutex_);
    if (is_stopped_ || is_running_) return;
    is_running_ = true;
    former.swap(thread_);
  }
  if (former.joinable()) former.join();
  auto thread = startThread("that brings back the store", [this] { run(); });
  {
    MutexLock lock(mutex_);
    if (!is_stopped_) thread_.swap(thread);
  }
  if (thread.joinable()) thread.join();  // stop() has not seen it
}

void StoreKeeper::stop() {
  std::thread thread;
  {
    MutexLock lock(mutex_);
    is_stopped_ = true;
    thread.swap(thread_);
  }
  stopped_.notify_all();
  if (thread.joinable()) thread.join();
}

bool StoreKeeper::isStopped() const {
  MutexLock lock(mutex_);
  return is_stopped_;
}

void StoreKeeper::run() {
  bool is_done = false;
  while (!is_done && !isStopped()) {
    try {
      if (const auto root = open(kDialTime)) {
        restore(root);
        is_done = true;
      }
    } catch (const std::exception& e) {
      log(LogLevel::kDebug, "the store cannot be brought back yet: " + textOf(e));
    }
    MutexLock lock(mutex_);
    if (!is_done) stopped_.wait_for(lock, kPause, [this]() TORCHRPC_REQUIRES(mutex_) { return is_stopped_; });
  }
  MutexLock lock(mutex_);
  is_running_ = false;
}

StorePtr StoreKeeper::open(Duration timeout) const {
  if (!waitForStore(address_.host, address_.port, timeout).empty()) return nullptr;
  c10d::TCPStoreOptions options;
  options.port = address_.port;
  options.waitWorkers = false;
  options.timeout = kConnectTimeout;
  auto store = c10::make_intrusive<c10d::TCPStore>(address_.host, options);
  store->setTimeout(kStoreTimeout);
  return store;
}

StorePtr StoreKeeper::groupIn(const StorePtr& root) const {
  for (int32_t number = 0;; ++number) {
    auto part = partOfGroup(root, number);
    if (!part->check({kStateKey})) return nullptr;
    if (part->check({own_.first}) && part->get(own_.first) == own_.second) return part;
  }
}

StorePtr StoreKeeper::findGroup(Duration timeout) {
  const auto root = open(timeout);
  return root ? groupIn(root) : nullptr;
}

// A newly served store is empty, except for what the restarted rank 0 and others have begun in the part of group 0. So
// the living group is written into part 1, and part 0 is marked as ended: workers that wait there then search again.
// Several keepers may do this at the same time, and rank 0 may have taken its place already: the first writer of each
// key wins.
void StoreKeeper::restore(const StorePtr& root) {
  if (groupIn(root)) return;  // rank 0 lives, and only the connection to it was lost
  const auto first = partOfGroup(root, 0);
  if (first->check({kStateKey}) && first->get(kStateKey) != bytesOf(kEndedState)) return;  // another group has formed
  const auto part = partOfGroup(root, 1);
  for (const auto& [key, value] : entries_()) part->compareSet(key, {}, value);
  markFormed(*part);
  first->compareSet(kStateKey, {}, bytesOf(kEndedState));
}

}  // namespace torchrpc
