#include "peers/link_prober.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace torchrpc {

void LinkProber::probe(std::vector<WorkerId> workers) {
  std::erase_if(workers, [this](WorkerId worker) { return connections_.hasLink(worker); });
  std::ranges::stable_partition(workers, [this](WorkerId worker) { return worker > self_; });
  {
    MutexLock lock(mutex_);
    if (is_closed_) return;
    for (const auto worker : workers) {
      if (open_.contains(worker) || std::ranges::find(queue_, worker) != queue_.end()) continue;
      queue_.push_back(worker);
    }
  }
  openQueued();
}

void LinkProber::close() {
  MutexLock lock(mutex_);
  is_closed_ = true;
  queue_.clear();
}

void LinkProber::openQueued() {
  {
    MutexLock lock(mutex_);
    // The thread that is in openQueued() checks the queue again before it leaves. So a probe that ends while it is
    // being opened does not recurse either.
    if (std::exchange(is_opening_, true)) return;
  }
  for (auto next = takeNext(); next != kNoWorker; next = takeNext()) open(next);
}

WorkerId LinkProber::takeNext() {
  MutexLock lock(mutex_);
  const auto counted =
      static_cast<size_t>(std::ranges::count_if(open_, [](const auto& each) { return !each.second.is_silent; }));
  if (queue_.empty() || counted >= kMaxOpenProbes) {
    is_opening_ = false;
    return kNoWorker;
  }
  const auto worker = queue_.front();
  queue_.pop_front();
  open_.emplace(worker, Probe());
  return worker;
}

void LinkProber::open(WorkerId worker) try {
  if (connections_.hasLink(worker)) return remove(worker);  // the worker has called this one meanwhile
  const auto link = connections_.link(worker);
  {
    MutexLock lock(mutex_);
    open_[worker].link = link->id();
  }
  link->send(encodeFrame({.kind = Kind::kPing}), [](const Status&) {});
  // Events of the link before its id was stored were not recognized as those of the probe.
  if (link->isClosed()) {
    end(*link, /*has_failed=*/true);
  } else if (link->hasReceived()) {
    end(*link, /*has_failed=*/false);
  }
} catch (const Error&) {  // the worker has left the group
  remove(worker);
  on_failed_(worker);
} catch (const std::exception&) {  // for example out of memory: this says nothing of the worker
  remove(worker);
}

void LinkProber::end(const Link& link, bool has_failed) {
  const auto worker = link.peer().id;
  {
    MutexLock lock(mutex_);
    const auto probe = open_.find(worker);
    if (probe == open_.end() || probe->second.link != link.id()) return;
    open_.erase(probe);
  }
  if (has_failed) on_failed_(worker);
  openQueued();
}

void LinkProber::remove(WorkerId worker) {
  MutexLock lock(mutex_);
  open_.erase(worker);
}

void LinkProber::onSilent(const Link& link) {
  {
    MutexLock lock(mutex_);
    const auto probe = open_.find(link.peer().id);
    if (probe == open_.end() || probe->second.link != link.id()) return;
    probe->second.is_silent = true;
  }
  openQueued();
}

}  // namespace torchrpc
