// Note [Forks]
// The memory of blocks is shared with the writer, so a child that the reader's process forks would share it, too: each
// of the two would see what the other does to a tensor, and the writer would use a block again that only the parent has
// given back. What is forked elsewhere is memory that from then on is each process's own, and so it is here: before a
// fork the blocks that tensors live in are copied aside, and the child, in which nothing has run yet, has the copies in
// their place.

#include "transport/native/shm/slabs.h"

#include <algorithm>
#include <cstring>
#include <list>
#include <pthread.h>
#include <sys/mman.h>
#include <utility>
#include <vector>

#include "base/error.h"
#include "wire/tensor_codec.h"

namespace torchrpc::native {

namespace {

/// All blocks that this process has ever written, and which therefore take memory, have at most so many bytes.
constexpr size_t kMostBytes = 128 << 20;
std::atomic<size_t> touched_bytes{0};

/// Copied in about the time in which a thread wakes up and looks for what has woken it.
constexpr size_t kLastBytes = 1 << 20;

}  // namespace

// ---- writer ----

SlabWriter::~SlabWriter() { touched_bytes -= touched_ * SlabControl::kUnitBytes; }

std::optional<uint64_t> SlabWriter::place(const Segment& data, const std::function<void()>& announce) {
  if (data.bytes < SlabControl::kUnitBytes) return std::nullopt;
  const auto first = allocate((data.bytes + SlabControl::kUnitBytes - 1) / SlabControl::kUnitBytes);
  if (!first) return std::nullopt;
  const auto place = *first * SlabControl::kUnitBytes;
  const auto* from = static_cast<const char*>(data.data());
  auto* to = memory_.data() + place;
  const size_t last = std::min(data.bytes, kLastBytes), before = data.bytes - last;
  std::memcpy(to, from, before);
  ++control_.placing;
  announce();
  std::memcpy(to + before, from + before, last);
  --control_.placing;
  return place;
}

std::optional<size_t> SlabWriter::allocate(size_t units) {
  MutexLock lock(mutex_);
  collect();
  // The first gap that is large enough: the same few blocks serve again and again. A page's first use costs several
  // times as much as copying it.
  size_t begin = 0;
  for (const auto& [first, count] : lent_) {
    if (first - begin >= units) break;
    begin = first + count;
  }
  if (!touch(begin + units)) return std::nullopt;
  lent_.emplace(begin, units);
  return begin;
}

void SlabWriter::collect() {
  const auto returns = control_.returns.load();
  if (std::exchange(returns_, returns) == returns) return;
  std::erase_if(lent_, [this](const auto& block) { return control_.returned[block.first].exchange(0) != 0; });
}

bool SlabWriter::touch(size_t units) {
  if (units <= touched_) return true;
  if (units > SlabControl::kUnits) return false;
  const auto more = (units - touched_) * SlabControl::kUnitBytes;
  if (touched_bytes.fetch_add(more) + more > kMostBytes) {
    touched_bytes -= more;
    return false;
  }
  touched_ = units;
  return true;
}

// ---- reader ----

namespace {

/// The blocks that tensors of this process live in. Forks wait for whoever adds or removes one.
class LiveSlabs {
 public:
  struct Block {
    void* memory;
    size_t bytes;
  };
  using Blocks = std::list<Block>;

  static LiveSlabs& get() {
    static auto& all = *new LiveSlabs();  // tensors may go while the process exits
    return all;
  }

  /// `block`: a single one.
  void add(Blocks& block) {
    MutexLock lock(mutex_);
    blocks_.splice(blocks_.end(), block);
  }
  /// Takes it back; false if the process that has added it is this one's parent.
  bool remove(Blocks::iterator block, uint64_t generation, Blocks& removed) {
    MutexLock lock(mutex_);
    if (generation != generation_) return false;
    removed.splice(removed.end(), blocks_, block);
    return true;
  }
  uint64_t generation() const { return generation_; }

 private:
  struct Copy {
    Block block;
    void* memory;
  };

  LiveSlabs() {
    ::pthread_atfork([] { get().beforeFork(); }, [] { get().inParent(); }, [] { get().inChild(); });
  }

  void beforeFork() {
    mutex_.lock();
    for (const auto& block : blocks_) {
      void* memory = ::mmap(nullptr, block.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) continue;  // there is hardly memory left for the child then
      std::memcpy(memory, block.memory, block.bytes);
      copies_.push_back({block, memory});
    }
  }
  void inParent() {
    for (const auto& copy : copies_) ::munmap(copy.memory, copy.block.bytes);
    copies_.clear();
    mutex_.unlock();
  }
  void inChild() {
    for (const auto& [block, memory] : copies_) {
      ::mremap(memory, block.bytes, block.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, block.memory);
    }
    copies_.clear();
    blocks_.clear();
    ++generation_;
    mutex_.unlock();
  }

  Mutex mutex_;
  // guarded by mutex_, which who forks holds meanwhile:
  Blocks blocks_;
  std::vector<Copy> copies_;
  std::atomic<uint64_t> generation_{0};  ///< changes where a process begins
};

/// What a tensor's storage holds of its block.
struct SlabLease {
  std::shared_ptr<const void> owner;
  std::atomic<uint8_t>& returned;
  std::atomic<uint64_t>& returns;
  uint64_t generation;
  LiveSlabs::Blocks::iterator block;

  static void end(void* held) {
    const std::unique_ptr<SlabLease> tenancy(static_cast<SlabLease*>(held));
    LiveSlabs::Blocks block;
    if (!LiveSlabs::get().remove(tenancy->block, tenancy->generation, block)) return;
    tenancy->returned = 1;
    ++tenancy->returns;
  }
};

}  // namespace

Segment SlabReader::take(uint64_t place, size_t bytes) const {
  const bool inside =
      place % SlabControl::kUnitBytes == 0 && place < memory_.size() && bytes > 0 && bytes <= memory_.size() - place;
  if (!inside) throw Error(ErrorCode::kProtocol, "a tensor outside of the memory that is shared");
  auto& inhabited = LiveSlabs::get();
  constexpr size_t kPage = 4096;
  LiveSlabs::Blocks block{{memory_.data() + place, (bytes + kPage - 1) / kPage * kPage}};
  auto tenancy = std::make_unique<SlabLease>(SlabLease{
      owner_, control_.returned[place / SlabControl::kUnitBytes], control_.returns, inhabited.generation(),
      block.begin()});
  inhabited.add(block);
  c10::DataPtr data(memory_.data() + place, tenancy.release(), &SlabLease::end, c10::Device(c10::DeviceType::CPU));
  return {storageOf(std::move(data), bytes), 0, bytes};
}

}  // namespace torchrpc::native
