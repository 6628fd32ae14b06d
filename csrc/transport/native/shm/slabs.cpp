// Note [Slabs in forked children]
// The reader's process shares the memory of slabs with the writer's process. After a fork of the reader's process, the
// child would share this memory as well: parent and child would see each other's changes of a tensor, and the writer
// would reuse a slab that only the parent has returned. After fork(), all other memory is private to each process, and
// the tensors on slabs must be, too. Therefore a fork handler copies the slabs with live tensors into private memory
// before the fork. In the child, before any other code runs, a handler moves the copies to the addresses of the slabs
// (mremap).

#include "transport/native/shm/slabs.h"

#include <algorithm>
#include <bitset>
#include <cstring>
#include <list>
#include <pthread.h>
#include <string_view>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/os/memory.h"
#include "base/process.h"
#include "base/sync/mutex.h"
#include "transport/native/shm/slab_allocator.h"
#include "wire/tensor_codec.h"

namespace torchrpc::native {

namespace {

/// The writer wakes the reader when this many bytes are left to copy. Copying them takes about as long as a thread
/// needs to wake up and to find the reason.
constexpr size_t kAnnouncedBytes = 1 << 20;

}  // namespace

// ---- writer ----

SlabWriter::SlabWriter(const std::shared_ptr<const void>& owner, SlabControl& control, std::span<char> memory)
    : control_(control), memory_(memory), allocator_(SlabAllocator::make(owner, control, memory)) {}

SlabWriter::~SlabWriter() { allocator_->retire(); }

std::optional<uint64_t> SlabWriter::write(const Segment& data, const std::function<void()>& announce) {
  if (data.bytes < SlabControl::kUnitBytes) return std::nullopt;
  const auto first = allocator_->allocate((data.bytes + SlabControl::kUnitBytes - 1) / SlabControl::kUnitBytes);
  if (!first) return std::nullopt;
  const auto slab_offset = *first * SlabControl::kUnitBytes;
  const auto* from = static_cast<const char*>(data.data());
  auto* to = memory_.data() + slab_offset;
  const size_t last = std::min(data.bytes, kAnnouncedBytes), before = data.bytes - last;
  std::memcpy(to, from, before);
  ++control_.writes_in_progress;
  announce();
  std::memcpy(to + before, from + before, last);
  --control_.writes_in_progress;
  return slab_offset;
}

// ---- reader ----

/// The slabs on which tensors of this process live. A fork waits while a thread adds or removes a slab.
class LiveSlabs {
 public:
  struct Slab {
    char* memory;
    size_t bytes;          ///< whole units
    bool counted = false;  ///< in ResidentBytes, because the connection has been closed
  };
  using Slabs = std::list<Slab>;

  static LiveSlabs& get() {
    static auto& all = *new LiveSlabs();  // never destroyed: tensors may be destroyed while the process exits
    return all;
  }

  /// `slab`: a list with one element, whose iterators remain valid.
  void add(Slabs& slab) {
    MutexLock lock(mutex_);
    slabs_.splice(slabs_.end(), slab);
  }
  /// Adds the slabs in that memory to the ResidentBytes of this process, and returns them.
  std::vector<std::span<char>> count(std::span<char> memory) {
    std::vector<std::span<char>> counted;
    MutexLock lock(mutex_);
    for (auto& slab : slabs_) {
      if (slab.memory < memory.data() || slab.memory >= memory.data() + memory.size()) continue;
      counted.emplace_back(slab.memory, slab.bytes);
      if (!std::exchange(slab.counted, true)) ResidentBytes::add(slab.bytes);
    }
    return counted;
  }
  /// Moves the slab to `removed`. Returns false if the slab was added before this process was forked: then it belongs
  /// to the parent.
  bool remove(Slabs::iterator slab, MakerProcess maker, Slabs& removed) {
    MutexLock lock(mutex_);
    if (!maker.isThisOne()) return false;
    removed.splice(removed.end(), slabs_, slab);
    return true;
  }

 private:
  struct Copy {
    Slab slab;
    void* memory;  ///< MAP_FAILED if the system provided none
  };

  LiveSlabs() {
    ::pthread_atfork([] { get().beforeFork(); }, [] { get().inParent(); }, [] { get().inChild(); });
  }

  // Called on the thread that forks, which holds the mutex from beforeFork() to inParent() or inChild().
  void beforeFork() TORCHRPC_ANNOTATE(no_thread_safety_analysis) {
    mutex_.lock();
    for (const auto& slab : slabs_) {
      void* memory = ::mmap(nullptr, slab.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory != MAP_FAILED) std::memcpy(memory, slab.memory, slab.bytes);
      copies_.push_back({slab, memory});
    }
  }
  void inParent() TORCHRPC_ANNOTATE(no_thread_safety_analysis) {
    for (const auto& copy : copies_) {
      if (copy.memory != MAP_FAILED) ::munmap(copy.memory, copy.slab.bytes);
    }
    copies_.clear();
    mutex_.unlock();
  }
  void inChild() TORCHRPC_ANNOTATE(no_thread_safety_analysis) {
    for (const auto& [slab, memory] : copies_) replaceInChild(slab, memory);
    copies_.clear();
    slabs_.clear();
    mutex_.unlock();
  }

  /// Replaces the slab by its copy. If that fails, the child must still not use the memory that it shares with other
  /// processes: the slab becomes inaccessible, and every access to the tensor kills the child by a signal.
  static void replaceInChild(const Slab& slab, void* copy) {
    if (copy != MAP_FAILED && os::moveMapping(copy, slab.bytes, slab.memory)) return;
    constexpr int kNothing = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (::mmap(slab.memory, slab.bytes, PROT_NONE, kNothing, -1, 0) != MAP_FAILED) {
      return complain("torchrpc: a forked process has no memory for a tensor of its parent: it cannot be used there\n");
    }
    complain("torchrpc: a forked process ends: it cannot be separated from the shared memory of its parent\n");
    ::_exit(kExitFailure);
  }
  /// Async-signal-safe, as everything that a child calls here.
  static void complain(std::string_view text) {
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
  }
  static constexpr int kExitFailure = 127;

  Mutex mutex_;
  Slabs slabs_ TORCHRPC_GUARDED_BY(mutex_);
  std::vector<Copy> copies_ TORCHRPC_GUARDED_BY(mutex_);
};

/// The owner of the memory, for the reader and its leases.
struct SlabReader::Owner {
  /// Marks the units as leased. Returns false, and marks nothing, if one of them is already leased. A correct writer
  /// never sends such a slab, because it reuses a slab only after its return. Without this check, a faulty peer could
  /// make this process count the same bytes, and copy them at a fork, any number of times.
  bool lease(size_t first, size_t count) {
    MutexLock lock(mutex);
    for (size_t unit = first; unit < first + count; ++unit) {
      if (leased[unit]) return false;
    }
    for (size_t unit = first; unit < first + count; ++unit) leased.set(unit);
    return true;
  }
  void endLease(size_t first, size_t count) {
    MutexLock lock(mutex);
    for (size_t unit = first; unit < first + count; ++unit) leased.reset(unit);
  }

  std::shared_ptr<const void> memory;
  MakerProcess maker{};
  std::atomic<bool> reader_ended{false};
  Mutex mutex{};
  std::bitset<SlabControl::kUnits> leased TORCHRPC_GUARDED_BY(mutex){};
};

/// Held by a tensor's storage, whose deleter returns the slab.
struct SlabReader::Lease {
  std::shared_ptr<Owner> owner;
  size_t first_unit;
  std::atomic<uint8_t>& returned;
  std::atomic<uint64_t>& return_count;
  MakerProcess maker;
  LiveSlabs::Slabs::iterator slab;

  /// The deleter of the storage's DataPtr.
  static void end(void* context) {
    const std::unique_ptr<Lease> lease(static_cast<Lease*>(context));
    LiveSlabs::Slabs removed;
    if (!LiveSlabs::get().remove(lease->slab, lease->maker, removed)) return;
    const auto& slab = removed.front();
    if (lease->owner->reader_ended) discardPages({slab.memory, slab.bytes});
    if (slab.counted) ResidentBytes::release(slab.bytes);
    lease->owner->endLease(lease->first_unit, slab.bytes / SlabControl::kUnitBytes);
    lease->returned = 1;
    ++lease->return_count;
  }
};

c10::DeleterFnPtr SlabReader::deleter() { return &Lease::end; }

SlabReader::SlabReader(std::shared_ptr<const void> owner, SlabControl& control, std::span<char> memory)
    : owner_(std::make_shared<Owner>(std::move(owner))), control_(control), memory_(memory) {}

SlabReader::~SlabReader() {
  if (!owner_->maker.isThisOne()) return;
  owner_->reader_ended = true;
  auto live = LiveSlabs::get().count(memory_);
  if (live.empty()) return;  // no lease keeps the memory alive
  std::ranges::sort(live, {}, &std::span<char>::data);
  char* begin = memory_.data();
  for (const auto& slab : live) {
    if (slab.data() > begin) discardPages({begin, slab.data()});
    begin = std::max(begin, slab.data() + slab.size());
  }
  discardPages({begin, memory_.data() + memory_.size()});
}

Segment SlabReader::lease(uint64_t slab_offset, size_t bytes) const {
  const bool inside = slab_offset % SlabControl::kUnitBytes == 0 && slab_offset < memory_.size() && bytes > 0 &&
      bytes <= memory_.size() - slab_offset;
  if (!inside) throw Error(ErrorCode::kProtocol, "a tensor outside of the memory that is shared");
  auto& live = LiveSlabs::get();
  const auto units = (bytes + SlabControl::kUnitBytes - 1) / SlabControl::kUnitBytes;
  const auto first_unit = slab_offset / SlabControl::kUnitBytes;
  auto* const data = memory_.data() + slab_offset;
  LiveSlabs::Slabs slab{{data, units * SlabControl::kUnitBytes}};
  auto held = std::make_unique<Lease>(
      Lease{owner_, first_unit, control_.returned[first_unit], control_.return_count, MakerProcess(), slab.begin()});
  if (!owner_->lease(first_unit, units)) {
    throw Error(ErrorCode::kProtocol, "a tensor in shared memory that another one uses");
  }
  live.add(slab);
  c10::DataPtr storage(data, held.release(), &Lease::end, c10::Device(c10::DeviceType::CPU));
  return {storageOf(std::move(storage), bytes), 0, bytes, /*is_shared=*/true};
}

}  // namespace torchrpc::native
