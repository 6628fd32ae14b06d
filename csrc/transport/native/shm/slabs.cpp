// Note [Slabs in forked children]
// The memory of slabs is shared with the writer's process. If the reader's process forks, the child would share it as
// well: parent and child would see each other's changes of a tensor, and the writer would reuse a slab that only the
// parent has returned. After fork(), all other memory is private to each process, and so must be the tensors on slabs.
// Therefore, before a fork, the slabs with live tensors are copied into private memory. In the child, where no other
// code has run yet, the copies are then mapped (mremap) at the addresses of the slabs.

#include "transport/native/shm/slabs.h"

#include <algorithm>
#include <cstring>
#include <list>
#include <pthread.h>
#include <sys/mman.h>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/process.h"
#include "wire/tensor_codec.h"

namespace torchrpc::native {

namespace {

/// Limit of the bytes of all slabs that this process has written at least once: these occupy physical memory.
constexpr size_t kMaxResidentBytes = 128 << 20;
std::atomic<size_t> resident_bytes{0};

/// The reader is woken when this much is left to copy. The copy of it takes about as long as a thread needs to wake up
/// and to find the reason.
constexpr size_t kAnnouncedBytes = 1 << 20;

}  // namespace

// ---- writer ----

SlabWriter::~SlabWriter() { resident_bytes -= resident_units_ * SlabControl::kUnitBytes; }

std::optional<uint64_t> SlabWriter::write(const Segment& data, const std::function<void()>& announce) {
  if (data.bytes < SlabControl::kUnitBytes) return std::nullopt;
  const auto first = allocate((data.bytes + SlabControl::kUnitBytes - 1) / SlabControl::kUnitBytes);
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

std::optional<size_t> SlabWriter::allocate(size_t units) {
  MutexLock lock(mutex_);
  collectReturned();
  // First fit, so that the same few slabs are reused: the first use of a page costs several times as much as the copy
  // of its data.
  size_t begin = 0;
  for (const auto& [first, count] : leased_) {
    if (first - begin >= units) break;
    begin = first + count;
  }
  if (!growResident(begin + units)) return std::nullopt;
  leased_.emplace(begin, units);
  return begin;
}

void SlabWriter::collectReturned() {
  const auto return_count = control_.return_count.load();
  if (std::exchange(seen_return_count_, return_count) == return_count) return;
  std::erase_if(leased_, [this](const auto& slab) { return control_.returned[slab.first].exchange(0) != 0; });
}

bool SlabWriter::growResident(size_t units) {
  if (units <= resident_units_) return true;
  if (units > SlabControl::kUnits) return false;
  const auto more = (units - resident_units_) * SlabControl::kUnitBytes;
  if (resident_bytes.fetch_add(more) + more > kMaxResidentBytes) {
    resident_bytes -= more;
    return false;
  }
  resident_units_ = units;
  return true;
}

// ---- reader ----

namespace {

/// The slabs on which tensors of this process live. A fork waits until no thread adds or removes one.
class LiveSlabs {
 public:
  struct Slab {
    void* memory;
    size_t bytes;
  };
  using Slabs = std::list<Slab>;

  static LiveSlabs& get() {
    static auto& all = *new LiveSlabs();  // never destroyed: tensors may end while the process exits
    return all;
  }

  /// `slab`: a list with one element, whose iterators remain valid.
  void add(Slabs& slab) {
    MutexLock lock(mutex_);
    slabs_.splice(slabs_.end(), slab);
  }
  /// Moves the slab to `removed`. False if it was added before this process was forked: then it is the parent's.
  bool remove(Slabs::iterator slab, MakerProcess maker, Slabs& removed) {
    MutexLock lock(mutex_);
    if (!maker.isThisOne()) return false;
    removed.splice(removed.end(), slabs_, slab);
    return true;
  }

 private:
  struct Copy {
    Slab slab;
    void* memory;
  };

  LiveSlabs() {
    ::pthread_atfork([] { get().beforeFork(); }, [] { get().inParent(); }, [] { get().inChild(); });
  }

  // Called by the thread that forks, which holds the mutex from beforeFork() to inParent() or inChild().
  void beforeFork() TORCHRPC_ANNOTATE(no_thread_safety_analysis) {
    mutex_.lock();
    for (const auto& slab : slabs_) {
      void* memory = ::mmap(nullptr, slab.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) continue;  // with so little memory left, the child can hardly run anyway
      std::memcpy(memory, slab.memory, slab.bytes);
      copies_.push_back({slab, memory});
    }
  }
  void inParent() TORCHRPC_ANNOTATE(no_thread_safety_analysis) {
    for (const auto& copy : copies_) ::munmap(copy.memory, copy.slab.bytes);
    copies_.clear();
    mutex_.unlock();
  }
  void inChild() TORCHRPC_ANNOTATE(no_thread_safety_analysis) {
    for (const auto& [slab, memory] : copies_) {
      ::mremap(memory, slab.bytes, slab.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, slab.memory);
    }
    copies_.clear();
    slabs_.clear();
    mutex_.unlock();
  }

  Mutex mutex_;
  Slabs slabs_ TORCHRPC_GUARDED_BY(mutex_);
  std::vector<Copy> copies_ TORCHRPC_GUARDED_BY(mutex_);
};

/// Held by a tensor's storage; its end returns the slab.
struct SlabLease {
  std::shared_ptr<const void> owner;
  std::atomic<uint8_t>& returned;
  std::atomic<uint64_t>& return_count;
  MakerProcess maker;
  LiveSlabs::Slabs::iterator slab;

  /// The deleter of the storage's DataPtr.
  static void end(void* context) {
    const std::unique_ptr<SlabLease> lease(static_cast<SlabLease*>(context));
    LiveSlabs::Slabs slab;
    if (!LiveSlabs::get().remove(lease->slab, lease->maker, slab)) return;
    lease->returned = 1;
    ++lease->return_count;
  }
};

}  // namespace

Segment SlabReader::lease(uint64_t slab_offset, size_t bytes) const {
  const bool inside = slab_offset % SlabControl::kUnitBytes == 0 && slab_offset < memory_.size() && bytes > 0 &&
      bytes <= memory_.size() - slab_offset;
  if (!inside) throw Error(ErrorCode::kProtocol, "a tensor outside of the memory that is shared");
  auto& live = LiveSlabs::get();
  constexpr size_t kPageBytes = 4096;
  auto* const data = memory_.data() + slab_offset;
  LiveSlabs::Slabs slab{{data, (bytes + kPageBytes - 1) / kPageBytes * kPageBytes}};
  auto held = std::make_unique<SlabLease>(SlabLease{
      owner_, control_.returned[slab_offset / SlabControl::kUnitBytes], control_.return_count, MakerProcess(),
      slab.begin()});
  live.add(slab);
  c10::DataPtr storage(data, held.release(), &SlabLease::end, c10::Device(c10::DeviceType::CPU));
  return {storageOf(std::move(storage), bytes), 0, bytes};
}

}  // namespace torchrpc::native
