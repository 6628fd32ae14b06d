// Note [Resident memory]
// A page of shared memory occupies physical memory from its first use until every process has unmapped the file, or the
// page is discarded (MADV_REMOVE). Units remain resident when their slab is returned, so that the next slab reuses
// them: the first use of a page costs several times as much as the copy of its data. All resident units of the writers
// of a process count against one limit. Therefore:
// - A writer that would exceed the limit asks all other writers to discard free units, and tries once more. An asked
//   writer answers only every kRequestsPerRound-th request, and then keeps the range of units that it has leased since
//   it last did so. Otherwise two writers that together need more than the limit would deprive each other of memory for
//   every message, which is slower than the ring.
// - If a connection is closed while tensors live on its slabs, its whole file stays mapped. So its writer then discards
//   all free units, its reader discards all units that no tensor needs, and both continue to count the rest.
// No thread holds the mutexes of two allocators at a time, or the mutexes of an allocator and of the registry. A thread
// that forks holds the mutex of the registry. In the child the registry is empty, because the memory belongs to the
// parent.

#include "transport/native/shm/slab_allocator.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <list>
#include <pthread.h>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/os/memory.h"
#include "base/sync/fork_safe_mutex.h"

namespace torchrpc::native {

namespace {

constexpr size_t kMaxResidentBytes = 128 << 20;
constexpr int kRequestsPerRound = 4;
constexpr size_t kUnitBytes = SlabControl::kUnitBytes;

std::atomic<size_t> resident_bytes{0};

}  // namespace

bool ResidentBytes::reserve(size_t bytes) {
  if (resident_bytes.fetch_add(bytes) + bytes <= kMaxResidentBytes) return true;
  resident_bytes -= bytes;
  return false;
}

void ResidentBytes::add(size_t bytes) { resident_bytes += bytes; }
void ResidentBytes::release(size_t bytes) { resident_bytes -= bytes; }

bool discardPages(std::span<char> memory) {
  if (os::discardSharedPages(memory)) return true;
  static LogOnce once;
  once.log(
      LogLevel::kWarning,
      std::string("shared memory that is not used cannot be given back (madvise): ") + std::strerror(errno) +
          "; it stays occupied until its connection and all tensors on it have ended");
  return false;
}

/// The allocators of this process that have, or may get, resident units.
class SlabAllocator::Registry {
 public:
  static Registry& get() {
    static auto& registry = *new Registry();  // never destroyed: tensors may be destroyed while the process exits
    return registry;
  }

  void add(std::shared_ptr<SlabAllocator> allocator) {
    MutexLock lock(mutex_);
    allocators_.push_back(std::move(allocator));
  }
  /// Removes retired allocators whose memory has been returned or unmapped.
  void removeUnused() {
    for (const auto& each : all()) {
      if (!each->giveBackIfRetired()) remove(*each);
    }
  }
  /// Asks all allocators except `requester` to give back memory.
  void requestMemory(const SlabAllocator* requester) {
    for (const auto& each : all()) {
      if (each.get() != requester && !each->giveBack()) remove(*each);
    }
  }
  void remove(const SlabAllocator& allocator) {
    std::list<std::shared_ptr<SlabAllocator>> removed;  // destroyed after the lock
    MutexLock lock(mutex_);
    const auto it = std::ranges::find_if(allocators_, [&](const auto& each) { return each.get() == &allocator; });
    if (it != allocators_.end()) removed.splice(removed.end(), allocators_, it);
  }

 private:
  Registry() {
    ::pthread_atfork(nullptr, nullptr, [] { get().forgetAll(); });
  }
  std::list<std::shared_ptr<SlabAllocator>> all() {
    MutexLock lock(mutex_);
    return allocators_;
  }

  /// Called in a forked child, because the memory belongs to its parent.
  void forgetAll() {
    MutexLock lock(mutex_);
    allocators_.clear();
    resident_bytes = 0;
  }

  ForkSafeMutex mutex_;
  std::list<std::shared_ptr<SlabAllocator>> allocators_ TORCHRPC_GUARDED_BY(mutex_);
};

std::shared_ptr<SlabAllocator> SlabAllocator::make(
    const std::shared_ptr<const void>& owner, SlabControl& control, std::span<char> memory) {
  // The constructor is private. NOLINTNEXTLINE(modernize-make-shared)
  std::shared_ptr<SlabAllocator> allocator(new SlabAllocator(owner, control, memory));
  Registry::get().removeUnused();
  Registry::get().add(allocator);
  return allocator;
}

std::optional<size_t> SlabAllocator::allocate(size_t units) {
  bool lacks_memory = false;
  const auto first = tryAllocate(units, lacks_memory);
  if (!lacks_memory) return first;
  Registry::get().requestMemory(this);
  return tryAllocate(units, lacks_memory);
}

std::optional<size_t> SlabAllocator::tryAllocate(size_t units, bool& lacks_memory) {
  MutexLock lock(mutex_);
  collectReturned();
  // First fit, so that the same few slabs are reused.
  size_t begin = 0;
  for (const auto& [first, count] : leased_) {
    if (first - begin >= units) break;
    begin = first + count;
  }
  const size_t end = begin + units;
  if (end > memory_.size() / kUnitBytes) return std::nullopt;
  size_t fresh = 0;
  for (size_t unit = begin; unit < end; ++unit) fresh += resident_[unit] ? 0 : 1;
  lacks_memory = fresh > 0 && !ResidentBytes::reserve(fresh * kUnitBytes);
  if (lacks_memory) return std::nullopt;
  if (fresh > 0) {
    for (size_t unit = begin; unit < end; ++unit) resident_.set(unit);
  }
  leased_.emplace(begin, units);
  recent_end_ = std::max(recent_end_, end);
  return begin;
}

void SlabAllocator::collectReturned() {
  const auto return_count = control_.return_count.load();
  if (std::exchange(seen_return_count_, return_count) == return_count) return;
  std::erase_if(leased_, [this](const auto& slab) { return control_.returned[slab.first].exchange(0) != 0; });
}

SlabAllocator::Units SlabAllocator::freeUnits() const {
  Units free;
  free.set();
  for (const auto& [first, count] : leased_) {
    for (size_t unit = first; unit < first + count; ++unit) free.reset(unit);
  }
  return free;
}

void SlabAllocator::discardFree(size_t begin) {
  const auto discarded = freeUnits() & resident_;
  for (size_t end = begin; end < discarded.size(); begin = end + 1) {
    for (end = begin; end < discarded.size() && discarded[end];) ++end;
    if (end == begin || !discardPages(memory_.subspan(begin * kUnitBytes, (end - begin) * kUnitBytes))) continue;
    for (size_t unit = begin; unit < end; ++unit) resident_.reset(unit);
    ResidentBytes::release((end - begin) * kUnitBytes);
  }
}

bool SlabAllocator::giveBack() {
  if (!maker_.isThisOne()) return false;
  std::shared_ptr<const void> owner;  // perhaps the last reference: destroyed after the lock
  MutexLock lock(mutex_);
  owner = weak_owner_.lock();
  if (!owner) {  // unmapped
    ResidentBytes::release(resident_.count() * kUnitBytes);
    resident_.reset();
    return false;
  }
  if (!owner_) {
    collectReturned();
    discardFree(0);
    return resident_.any();
  }
  if (++requests_ < kRequestsPerRound) return true;
  requests_ = 0;
  collectReturned();
  discardFree(std::exchange(recent_end_, 0));
  return true;
}

bool SlabAllocator::giveBackIfRetired() {
  {
    MutexLock lock(mutex_);
    if (owner_) return true;
  }
  return giveBack();
}

void SlabAllocator::retire() {
  if (!maker_.isThisOne()) return;
  {
    std::shared_ptr<const void> owner;  // destroyed after the lock
    MutexLock lock(mutex_);
    owner.swap(owner_);
  }
  if (!giveBack()) Registry::get().remove(*this);
}

}  // namespace torchrpc::native
