#include "runtime.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <pthread.h>
#include <set>
#include <sstream>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

namespace simulated {
namespace {

using Clock = std::chrono::steady_clock;
using VectorClock = std::vector<uint64_t>;  // by the index of the stream

constexpr size_t kGranuleBytes = 512;
constexpr size_t kMaxCachedBytes = size_t{1} << 30;  // freed device memory that is kept for reuse

struct TaskState {
  std::atomic<bool> is_poisoned{false};
};

struct QueuedTask {
  Work work;
  std::shared_ptr<TaskState> state;
  Clock::time_point not_before;
  bool may_fail = true;
};

struct PastAccess {
  TaskId task;
  const char* begin;
  const char* end;
  bool is_write;
  const char* label;
  std::shared_ptr<TaskState> state;
};

// One stream. The runtime's mutex guards `clock` and the order of enqueuing; the stream's own guards the queue.
struct StreamState {
  int index = 0;
  c10::DeviceIndex device = 0;
  VectorClock clock;
  uint64_t enqueued = 0;
  std::atomic<uint64_t> completed{0};

  std::mutex mutex;
  std::condition_variable work_came;
  std::condition_variable task_completed;
  std::deque<QueuedTask> queue;
  std::exception_ptr error;
  bool should_stop = false;
  std::thread thread;

  bool hasCompleted(uint64_t number) const { return completed.load(std::memory_order_acquire) >= number; }
};

struct Recording {
  TaskId task;
  VectorClock clock;
  std::atomic<int64_t> time_ns{0};
};

// Its memory is mapped twice: at `base`, the address that torch knows, nobody may access it, so that code of the host
// that does by mistake ends with SIGSEGV; tasks access it at `memory`.
struct Block {
  char* base = nullptr;
  char* memory = nullptr;
  size_t bytes = 0;
  int file = -1;  // the memfd
  c10::DeviceIndex device = 0;
  int stream = 0;  // on which it was allocated
  bool is_live = false;
  bool is_borrowed = false;  ///< memory of another process; as with CUDA, it cannot be shared again
  std::vector<PastAccess> accesses;
  std::set<int> recorded_streams;
  std::vector<TaskId> needed_by;  // of a freed block: tasks of recorded streams
};

struct PinnedBlock {
  char* base = nullptr;
  size_t bytes = 0;
  bool is_live = false;
  std::vector<TaskId> needed_by;
};

struct DeviceState {
  size_t allocated_bytes = 0;
  size_t peak_bytes = 0;
  size_t cached_bytes = 0;
  size_t limit_bytes = size_t{16} << 30;
  int failing_allocations = 0;
  std::atomic<int> failing_tasks{0};
  std::atomic<int64_t> executed_tasks{0};
  std::array<c10::StreamId, 2> next_in_pool{};
  std::map<std::pair<int, size_t>, std::vector<Block*>> free_blocks;
};

struct Runtime {
  explicit Runtime(int count) : devices(count), streams(count * kStreams) {
    for (int i = 0; i < static_cast<int>(streams.size()); ++i) {
      streams[i].index = i;
      streams[i].device = static_cast<c10::DeviceIndex>(i / kStreams);
      streams[i].clock.resize(streams.size());
    }
  }

  std::mutex mutex;
  std::vector<DeviceState> devices;
  std::vector<StreamState> streams;
  std::map<const char*, Block*> blocks;
  std::map<const char*, PinnedBlock*> pinned_blocks;
  std::vector<Block*> deferred_blocks;
  std::vector<PastAccess> host_accesses;  // by copies
  std::vector<std::string> conflicts;
  bool is_stopped = false;
};

double numberFromEnvironment(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtod(text, nullptr) : otherwise;
}

std::atomic<bool> used{false};
std::atomic<bool> forked{false};
std::atomic<int64_t> start_delay_ns{static_cast<int64_t>(numberFromEnvironment("SIM_START_DELAY_S", 0.001) * 1e9)};
std::atomic<bool> is_strict{numberFromEnvironment("SIM_STRICT", 1) != 0};
std::atomic<ReleaseGil> release_gil{nullptr};

int configuredDevices() {
  static const int count = std::clamp(static_cast<int>(numberFromEnvironment("SIM_DEVICES", 4)), 1, 16);
  return count;
}

// Every block has a file, which other processes open.
void allowManyFiles() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
}

// Never destroyed: memory is freed, and events are destroyed, until the process ends.
Runtime& runtime() {
  checkUsable();
  static Runtime* const instance = [] {
    used = true;
    allowManyFiles();
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    return new Runtime(configuredDevices());
  }();
  return *instance;
}

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, 16> current_streams{};

void checkDevice(int device) {
  TORCH_CHECK(
      device >= 0 && device < deviceCount(), "invalid device ordinal: sim:", device, "; there are ", deviceCount(),
      " simulated devices (SIM_DEVICES)");
}

int indexOf(c10::Stream stream) {
  TORCH_CHECK(
      stream.device_type() == c10::DeviceType::PrivateUse1, "not a stream of the simulated accelerator: ", stream);
  checkDevice(stream.device_index());
  TORCH_CHECK(stream.id() >= 0 && stream.id() < kStreams, "no such stream: ", stream);
  return static_cast<int>(stream.device_index() * kStreams + stream.id());
}

c10::Stream makeStream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, device), id);
}

std::string describe(const StreamState& stream) {
  return "stream " + std::to_string(stream.index % kStreams) + " of sim:" + std::to_string(stream.device);
}

void execute(Runtime& r, StreamState& stream, QueuedTask& task) {
  auto& device = r.devices[stream.device];
  try {
    if (task.may_fail && device.failing_tasks > 0 && device.failing_tasks.fetch_sub(1) > 0) {
      task.state->is_poisoned = true;
      task.work(task.state->is_poisoned);
      TORCH_CHECK(false, "a kernel on sim:", static_cast<int>(stream.device), " failed, as the test demanded");
    }
    task.work(task.state->is_poisoned);
  } catch (...) {
    std::lock_guard lock(stream.mutex);
    if (!stream.error) {
      stream.error = std::current_exception();
    }
  }
  task.work = nullptr;  // may release the last reference to a storage of the host
  device.executed_tasks++;
}

void complete(StreamState& stream) {
  {
    std::lock_guard lock(stream.mutex);
    stream.completed.fetch_add(1, std::memory_order_release);
  }
  stream.task_completed.notify_all();
}

void runStream(Runtime& r, StreamState& stream) {
  std::unique_lock lock(stream.mutex);
  while (true) {
    stream.work_came.wait(lock, [&] { return stream.should_stop || !stream.queue.empty(); });
    if (stream.queue.empty()) {
      return;
    }
    auto task = std::move(stream.queue.front());
    stream.queue.pop_front();
    lock.unlock();
    std::this_thread::sleep_until(task.not_before);  // the simulated device is slow
    execute(r, stream, task);
    complete(stream);
    lock.lock();
  }
}

void waitUntilCompleted(StreamState& stream, uint64_t number) {
  if (stream.hasCompleted(number)) {
    return;
  }
  std::unique_lock lock(stream.mutex);
  stream.task_completed.wait(lock, [&] { return stream.hasCompleted(number); });
}

void throwPendingError(StreamState& stream) {
  std::exception_ptr error;
  {
    std::lock_guard lock(stream.mutex);
    std::swap(error, stream.error);
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

void waitOnHost(StreamState& stream, uint64_t number) {
  if (!stream.hasCompleted(number)) {
    auto release = release_gil.load();
    auto released = release ? release() : nullptr;
    waitUntilCompleted(stream, number);
  }
  throwPendingError(stream);
}

// The following functions need the runtime's mutex.

Block* findBlock(Runtime& r, const void* pointer) {
  auto it = r.blocks.upper_bound(static_cast<const char*>(pointer));
  if (it == r.blocks.begin()) {
    return nullptr;
  }
  auto* block = std::prev(it)->second;
  return pointer < block->base + block->bytes ? block : nullptr;
}

PinnedBlock* findPinned(Runtime& r, const void* pointer) {
  auto it = r.pinned_blocks.upper_bound(static_cast<const char*>(pointer));
  if (it == r.pinned_blocks.begin()) {
    return nullptr;
  }
  auto* block = std::prev(it)->second;
  return block->is_live && pointer < block->base + block->bytes ? block : nullptr;
}

bool isOrdered(Runtime& r, TaskId earlier, const StreamState& later) {
  return later.clock[earlier.stream] >= earlier.number || r.streams[earlier.stream].hasCompleted(earlier.number);
}

void forgetCompleted(Runtime& r, std::vector<PastAccess>& accesses) {
  std::erase_if(accesses, [&](const PastAccess& access) {
    return r.streams[access.task.stream].hasCompleted(access.task.number);
  });
}

void forgetCompleted(Runtime& r, std::vector<TaskId>& tasks) {
  std::erase_if(tasks, [&](TaskId task) { return r.streams[task.stream].hasCompleted(task.number); });
}

// Makes the result of a task poison for a conflict.
void spoil(TaskState& state) {
  if (is_strict) {
    state.is_poisoned = true;
  }
}

void noteConflictLocked(Runtime& r, std::string description) {
  if (r.conflicts.size() < 1000) {
    r.conflicts.push_back(std::move(description));
  }
}

void trackAccess(
    Runtime& r, StreamState& stream, TaskId task, const char* label, const Access& access,
    const std::shared_ptr<TaskState>& state) {
  if (access.bytes == 0) {
    return;
  }
  auto* block = findBlock(r, access.begin);
  auto& accesses = block ? block->accesses : r.host_accesses;
  forgetCompleted(r, accesses);
  const char* end = access.begin + access.bytes;
  if (block && !block->is_live) {
    spoil(*state);
    noteConflictLocked(r, std::string(label) + " on " + describe(stream) + " uses memory that was freed");
  }
  for (const auto& past : accesses) {
    if (past.end <= access.begin || end <= past.begin || (!past.is_write && !access.is_write) || past.state == state ||
        isOrdered(r, past.task, stream)) {
      continue;
    }
    noteConflictLocked(
        r,
        std::string(label) + " on " + describe(stream) + (access.is_write ? " writes" : " reads") + " what " +
            past.label + " on " + describe(r.streams[past.task.stream]) + (past.is_write ? " writes" : " reads") +
            ", and does not wait for it");
    spoil(past.is_write ? *state : *past.state);
  }
  accesses.push_back({task, access.begin, end, access.is_write, label, state});
}

TaskId enqueueLocked(
    Runtime& r, std::unique_lock<std::mutex>& lock, int index, const char* label, const std::vector<Access>& accesses,
    Work work, bool is_late) {
  auto& stream = r.streams[index];
  TaskId id{index, stream.enqueued + 1};
  auto state = std::make_shared<TaskState>();
  for (const auto& access : accesses) {
    trackAccess(r, stream, id, label, access, state);
  }
  stream.enqueued = id.number;
  stream.clock[index] = id.number;
  QueuedTask task{
      std::move(work), std::move(state),
      is_late ? Clock::now() + std::chrono::nanoseconds(start_delay_ns.load()) : Clock::time_point(), is_late};
  if (r.is_stopped) {
    lock.unlock();
    waitUntilCompleted(stream, id.number - 1);
    execute(r, stream, task);
    complete(stream);
    lock.lock();
    return id;
  }
  {
    std::lock_guard stream_lock(stream.mutex);
    if (!stream.thread.joinable()) {
      stream.thread = std::thread(runStream, std::ref(r), std::ref(stream));
    }
    stream.queue.push_back(std::move(task));
  }
  stream.work_came.notify_one();
  return id;
}

void mapDeviceMemory(Block& block) {
  const int fd = block.file;
  const bool is_sized = fd >= 0;
  void* base = is_sized ? mmap(nullptr, block.bytes, PROT_NONE, MAP_SHARED, fd, 0) : MAP_FAILED;
  void* memory = is_sized ? mmap(nullptr, block.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
  TORCH_CHECK_WITH(
      OutOfMemoryError, base != MAP_FAILED && memory != MAP_FAILED, "the host has no memory for ", block.bytes,
      " bytes of a simulated device");
  block.base = static_cast<char*>(base);
  block.memory = static_cast<char*>(memory);
}

void makeFile(Block& block) {
  block.file = memfd_create("simulated device", MFD_CLOEXEC);
  if (block.file >= 0 && ftruncate(block.file, static_cast<off_t>(block.bytes)) != 0) {
    close(block.file);
    block.file = -1;
  }
}

void unmap(const Block& block) {
  munmap(block.base, block.bytes);
  munmap(block.memory, block.bytes);
  close(block.file);
}

void poisonInOrder(Runtime& r, std::unique_lock<std::mutex>& lock, Block& block, const char* label) {
  char* memory = block.memory;
  const size_t bytes = block.bytes;
  enqueueLocked(
      r, lock, block.stream, label, {{block.base, bytes, true}},
      [=](const auto&) { std::memset(memory, kPoison, bytes); },
      /*is_late=*/false);
}

void makeReusable(Runtime& r, std::unique_lock<std::mutex>& lock, Block& block) {
  block.is_live = true;  // else poisoning it would count as a use after it was freed
  poisonInOrder(r, lock, block, "free");
  block.is_live = false;
  block.recorded_streams.clear();
  auto& device = r.devices[block.device];
  device.cached_bytes += block.bytes;
  device.free_blocks[{block.stream, block.bytes}].push_back(&block);
}

void reuseDeferredBlocks(Runtime& r, std::unique_lock<std::mutex>& lock) {
  std::vector<Block*> ready;
  std::erase_if(r.deferred_blocks, [&](Block* block) {
    forgetCompleted(r, block->needed_by);
    if (!block->needed_by.empty()) {
      return false;
    }
    ready.push_back(block);
    return true;
  });
  for (auto* block : ready) {
    makeReusable(r, lock, *block);
  }
}

// Unmaps blocks that no task uses.
void trimCache(Runtime& r, DeviceState& device, size_t max_bytes) {
  for (auto& [key, blocks] : device.free_blocks) {
    std::erase_if(blocks, [&](Block* block) {
      forgetCompleted(r, block->accesses);
      if (device.cached_bytes <= max_bytes || !block->accesses.empty()) {
        return false;
      }
      device.cached_bytes -= block->bytes;
      r.blocks.erase(block->base);
      unmap(*block);
      delete block;
      return true;
    });
  }
}

void freeBlock(void* context) {
  if (isInBadFork()) {
    return;
  }
  auto& r = runtime();
  std::unique_lock lock(r.mutex);
  auto& block = *static_cast<Block*>(context);
  auto& device = r.devices[block.device];
  device.allocated_bytes -= block.bytes;
  block.is_live = false;
  forgetCompleted(r, block.accesses);
  for (const auto& access : block.accesses) {
    if (!block.recorded_streams.contains(access.task.stream) && !isOrdered(r, access.task, r.streams[block.stream])) {
      spoil(*access.state);
      noteConflictLocked(
          r,
          std::string("memory of ") + describe(r.streams[block.stream]) + " is freed while " + access.label + " on " +
              describe(r.streams[access.task.stream]) + " uses it, without record_stream");
    }
  }
  for (int index : block.recorded_streams) {
    block.needed_by.push_back({index, r.streams[index].enqueued});
  }
  forgetCompleted(r, block.needed_by);
  if (block.needed_by.empty()) {
    makeReusable(r, lock, block);
  } else {
    r.deferred_blocks.push_back(&block);
  }
}

void freePinned(void* context) {
  if (isInBadFork()) {
    return;
  }
  auto& r = runtime();
  std::lock_guard lock(r.mutex);
  static_cast<PinnedBlock*>(context)->is_live = false;  // allocatePinned() reuses it
}

}  // namespace

// An event of one device, recorded any number of times.
class Event {
 public:
  explicit Event(c10::DeviceIndex device) : device(device) {}
  const c10::DeviceIndex device;
  std::mutex mutex;
  std::shared_ptr<Recording> last;

  std::shared_ptr<Recording> recording() {
    std::lock_guard lock(mutex);
    return last;
  }
};

void checkUsable() {
  TORCH_CHECK(
      !forked,
      "Cannot re-initialize the simulated accelerator in a forked child process. To use it with multiprocessing, "
      "use the start method 'spawn'.");
}

bool isInBadFork() noexcept { return forked; }

bool isInitialized() noexcept { return used && !forked; }

int deviceCount() noexcept { return configuredDevices(); }

c10::DeviceIndex currentDevice() noexcept { return current_device; }

c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) {
  checkDevice(device);
  return std::exchange(current_device, device);
}

void setDeviceUnchecked(c10::DeviceIndex device) noexcept { current_device = device; }

c10::Stream currentStream(c10::DeviceIndex device) {
  if (device < 0) {
    device = current_device;
  }
  checkDevice(device);
  return makeStream(device, current_streams[device]);
}

c10::Stream exchangeStream(c10::Stream stream) {
  indexOf(stream);
  return makeStream(stream.device_index(), std::exchange(current_streams[stream.device_index()], stream.id()));
}

c10::Stream defaultStream(c10::DeviceIndex device) {
  checkDevice(device < 0 ? current_device : device);
  return makeStream(device < 0 ? current_device : device, 0);
}

c10::Stream streamFromPool(c10::DeviceIndex device, bool is_high_priority) {
  if (device < 0) {
    device = current_device;
  }
  checkDevice(device);
  auto& r = runtime();
  std::lock_guard lock(r.mutex);
  auto& next = r.devices[device].next_in_pool[is_high_priority];
  const auto id = 1 + next + (is_high_priority ? kPoolStreams : 0);
  next = (next + 1) % kPoolStreams;
  return makeStream(device, id);
}

TaskId enqueue(c10::Stream stream, const char* label, std::vector<Access> accesses, Work work, bool is_late) {
  auto& r = runtime();
  std::unique_lock lock(r.mutex);
  return enqueueLocked(r, lock, indexOf(stream), label, accesses, std::move(work), is_late);
}

void waitForTask(TaskId task) { waitOnHost(runtime().streams[task.stream], task.number); }

bool isStreamIdle(c10::Stream stream) {
  auto& r = runtime();
  std::lock_guard lock(r.mutex);
  auto& state = r.streams[indexOf(stream)];
  return state.hasCompleted(state.enqueued);
}

void synchronizeStream(c10::Stream stream) {
  auto& r = runtime();
  auto& state = r.streams[indexOf(stream)];
  uint64_t number = 0;
  {
    std::lock_guard lock(r.mutex);
    number = state.enqueued;
  }
  waitOnHost(state, number);
}

void synchronizeDevice(c10::DeviceIndex device) {
  if (device < 0) {
    device = current_device;
  }
  checkDevice(device);
  for (c10::StreamId id = 0; id < kStreams; ++id) {
    synchronizeStream(makeStream(device, id));
  }
}

void recordEvent(void** event, c10::Stream stream, c10::DeviceIndex device) {
  TORCH_CHECK(
      device < 0 || device == stream.device_index(), "Event device ", static_cast<int>(device),
      " does not match recording stream's device ", static_cast<int>(stream.device_index()), ".");
  auto& r = runtime();
  auto* state = static_cast<Event*>(*event);
  if (!state) {
    *event = state = new Event(stream.device_index());
  }
  TORCH_CHECK(
      state->device == stream.device_index(), "Event device ", static_cast<int>(state->device),
      " does not match recording stream's device ", static_cast<int>(stream.device_index()), ".");
  auto recording = std::make_shared<Recording>();
  {
    std::unique_lock lock(r.mutex);
    const int index = indexOf(stream);
    recording->task = enqueueLocked(
        r, lock, index, "record", {},
        [recording](const auto&) { recording->time_ns = Clock::now().time_since_epoch().count(); }, /*is_late=*/false);
    recording->clock = r.streams[index].clock;
  }
  std::lock_guard lock(state->mutex);
  state->last = std::move(recording);
}

void waitForEvent(void* event, c10::Stream stream) {
  auto recording = event ? static_cast<Event*>(event)->recording() : nullptr;
  if (!recording) {
    return;
  }
  auto& r = runtime();
  std::unique_lock lock(r.mutex);
  const int index = indexOf(stream);
  auto& clock = r.streams[index].clock;
  std::transform(clock.begin(), clock.end(), recording->clock.begin(), clock.begin(), [](uint64_t a, uint64_t b) {
    return std::max(a, b);
  });
  enqueueLocked(
      r, lock, index, "wait", {},
      [&r, recording](const auto&) { waitUntilCompleted(r.streams[recording->task.stream], recording->task.number); },
      /*is_late=*/false);
}

bool isEventComplete(void* event) {
  auto recording = event ? static_cast<Event*>(event)->recording() : nullptr;
  return !recording || runtime().streams[recording->task.stream].hasCompleted(recording->task.number);
}

void synchronizeEvent(void* event) {
  if (auto recording = event ? static_cast<Event*>(event)->recording() : nullptr) {
    waitForTask(recording->task);
  }
}

double elapsedMilliseconds(void* start, void* end) {
  auto first = start ? static_cast<Event*>(start)->recording() : nullptr;
  auto second = end ? static_cast<Event*>(end)->recording() : nullptr;
  TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
  TORCH_CHECK(
      isEventComplete(start) && isEventComplete(end), "Both events must be completed before calculating elapsed time.");
  return static_cast<double>(second->time_ns - first->time_ns) / 1e6;
}

void destroyEvent(void* event) noexcept { delete static_cast<Event*>(event); }

c10::DataPtr allocate(size_t bytes) {
  const auto device_index = current_device;
  const c10::Device device(c10::DeviceType::PrivateUse1, device_index);
  auto& r = runtime();
  if (bytes == 0) {
    return {nullptr, device};
  }
  bytes = (bytes + kGranuleBytes - 1) / kGranuleBytes * kGranuleBytes;
  const int stream = indexOf(currentStream(device_index));
  std::unique_lock lock(r.mutex);
  reuseDeferredBlocks(r, lock);
  auto& state = r.devices[device_index];
  const bool should_fail = state.failing_allocations > 0 && state.failing_allocations-- > 0;
  TORCH_CHECK_WITH(
      OutOfMemoryError, !should_fail && state.allocated_bytes + bytes <= state.limit_bytes,
      "sim:", static_cast<int>(device_index), " is out of memory. Tried to allocate ", bytes, " bytes; ",
      state.allocated_bytes, " of ", state.limit_bytes, " bytes are in use.");
  auto& reusable = state.free_blocks[{stream, bytes}];
  Block* block = nullptr;
  if (!reusable.empty()) {
    block = reusable.back();
    reusable.pop_back();
    state.cached_bytes -= bytes;
  } else {
    if (state.cached_bytes + bytes > kMaxCachedBytes) {
      trimCache(r, state, kMaxCachedBytes > bytes ? kMaxCachedBytes - bytes : 0);
    }
    auto fresh = std::make_unique<Block>();
    fresh->bytes = bytes;
    makeFile(*fresh);
    mapDeviceMemory(*fresh);
    block = fresh.release();
    block->device = device_index;
    block->stream = stream;
    r.blocks[block->base] = block;
  }
  block->is_live = true;
  state.allocated_bytes += bytes;
  state.peak_bytes = std::max(state.peak_bytes, state.allocated_bytes);
  poisonInOrder(r, lock, *block, "allocate");
  return {block->base, block, &freeBlock, device};
}

SharedMemory exportMemory(const void* pointer) {
  auto& r = runtime();
  std::lock_guard lock(r.mutex);
  auto* block = findBlock(r, pointer);
  TORCH_CHECK(block, "no memory of a simulated device");
  TORCH_CHECK(!block->is_borrowed, "memory of another process has no handle");
  std::ostringstream handle;
  // The number of a file is used again, but not its inode.
  struct stat file{};
  TORCH_CHECK(fstat(block->file, &file) == 0, "the memory has no file");
  handle << getpid() << ' ' << block->file << ' ' << block->bytes << ' ' << file.st_ino;
  return {handle.str(), static_cast<uint64_t>(static_cast<const char*>(pointer) - block->base)};
}

OpenedBlock openMemory(c10::DeviceIndex device, const std::string& handle) {
  checkDevice(device);
  pid_t process = 0;
  int file = -1;
  ino_t inode = 0;
  auto block = std::make_unique<Block>();
  std::istringstream in(handle);
  TORCH_CHECK(in >> process >> file >> block->bytes >> inode && in.eof(), "no handle of simulated memory");
  const auto path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(file);
  std::array<char, 256> target{};
  const bool is_ours = readlink(path.c_str(), target.data(), target.size() - 1) > 0 &&
      std::string(target.data()).starts_with("/memfd:simulated device");
  block->file = is_ours ? open(path.c_str(), O_RDWR | O_CLOEXEC) : -1;
  struct stat found{};
  TORCH_CHECK(
      block->file >= 0 && fstat(block->file, &found) == 0 && found.st_ino == inode &&
          found.st_size == static_cast<off_t>(block->bytes),
      "there is no such memory any more");
  mapDeviceMemory(*block);
  block->device = device;
  block->stream = indexOf(defaultStream(device));
  block->is_live = true;
  block->is_borrowed = true;
  auto& r = runtime();
  std::lock_guard lock(r.mutex);
  auto* const opened = block.release();
  r.blocks[opened->base] = opened;
  return {opened->base, opened->bytes};
}

void closeMemory(void* base) {
  auto& r = runtime();
  std::unique_lock lock(r.mutex);
  auto* const block = findBlock(r, base);
  TORCH_CHECK(block && block->base == base, "no memory of another process");
  forgetCompleted(r, block->accesses);
  for (const auto& access : block->accesses) {
    noteConflictLocked(r, std::string("memory of another process is unmapped while ") + access.label + " uses it");
  }
  const auto accesses = std::exchange(block->accesses, {});
  r.blocks.erase(block->base);
  lock.unlock();
  for (const auto& access : accesses) {
    waitUntilCompleted(r.streams[access.task.stream], access.task.number);
  }
  unmap(*block);
  delete block;
}

void recordStream(const c10::DataPtr& memory, c10::Stream stream) {
  auto& r = runtime();
  std::lock_guard lock(r.mutex);
  auto* block = findBlock(r, memory.get());
  const int index = indexOf(stream);
  if (block && block->stream != index) {
    block->recorded_streams.insert(index);
  }
}

c10::DeviceIndex deviceOfPointer(const void* pointer) {
  auto& r = runtime();
  std::lock_guard lock(r.mutex);
  auto* block = findBlock(r, pointer);
  return block ? block->device : static_cast<c10::DeviceIndex>(-1);
}

char* memoryForTasks(const void* pointer) {
  if (!pointer) {
    return nullptr;
  }
  auto& r = runtime();
  std::lock_guard lock(r.mutex);
  auto* block = findBlock(r, pointer);
  TORCH_CHECK(block, "a tensor of a simulated device has memory that is not of this device");
  return block->memory + (static_cast<const char*>(pointer) - block->base);
}

void copyMemory(void* to, const void* from, size_t bytes) {
  enqueue(
      currentStream(-1), "copy",
      {{static_cast<const char*>(from), bytes, false}, {static_cast<char*>(to), bytes, true}},
      [to = memoryForTasks(to), from = memoryForTasks(from), bytes](const auto& is_poisoned) {
        std::memcpy(to, from, bytes);
        if (is_poisoned) {
          std::memset(to, kPoison, bytes);
        }
      });
}

size_t allocatedBytes(c10::DeviceIndex device) {
  checkDevice(device);
  auto& r = runtime();
  std::lock_guard lock(r.mutex);
  return r.devices[device].allocated_bytes;
}

size_t peakAllocatedBytes(c10::DeviceIndex device) {
  checkDevice(device);
  auto& r = runtime();
  std::lock_guard lock(r.mutex);
  return r.devices[device].peak_bytes;
}

void resetPeakAllocatedBytes(c10::DeviceIndex device) {
  checkDevice(device);
  auto& r = runtime();
  std::lock_guard lock(r.mutex);
  r.devices[device].peak_bytes = r.devices[device].allocated_bytes;
}

size_t memoryLimitBytes(c10::DeviceIndex device) {
  checkDevice(device);
  auto& r = runtime();
  std::lock_guard lock(r.mutex);
  return r.devices[device].limit_bytes;
}

bool isHostMemoryInUse(const void* pointer, size_t bytes) {
  auto& r = runtime();
  std::lock_guard lock(r.mutex);
  forgetCompleted(r, r.host_accesses);
  const auto* begin = static_cast<const char*>(pointer);
  return std::any_of(r.host_accesses.begin(), r.host_accesses.end(), [&](const PastAccess& access) {
    return access.begin < begin + bytes && begin < access.end;
  });
}

c10::DataPtr allocatePinned(size_t bytes) {
  auto& r = runtime();
  if (bytes == 0) {
    return {nullptr, c10::Device(c10::DeviceType::CPU)};
  }
  bytes = (bytes + kGranuleBytes - 1) / kGranuleBytes * kGranuleBytes;
  std::lock_guard lock(r.mutex);
  PinnedBlock* block = nullptr;
  for (auto& [base, each] : r.pinned_blocks) {
    if (!each->is_live && each->bytes == bytes) {
      forgetCompleted(r, each->needed_by);
      if (each->needed_by.empty()) {
        block = each;
        break;
      }
    }
  }
  if (!block) {
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, base != MAP_FAILED, "the host has no memory for ", bytes, " pinned bytes");
    block = new PinnedBlock;
    block->base = static_cast<char*>(base);
    block->bytes = bytes;
    r.pinned_blocks[block->base] = block;
  }
  block->is_live = true;
  std::memset(block->base, kPoison, bytes);
  return {block->base, block, &freePinned, c10::Device(c10::DeviceType::CPU)};
}

bool isPinned(const void* pointer) {
  if (!used || forked) {
    return false;
  }
  auto& r = runtime();
  std::lock_guard lock(r.mutex);
  return findPinned(r, pointer) != nullptr;
}

bool recordPinned(const void* pointer, c10::Stream stream) {
  auto& r = runtime();
  std::lock_guard lock(r.mutex);
  auto* block = findPinned(r, pointer);
  if (!block) {
    return false;
  }
  const int index = indexOf(stream);
  forgetCompleted(r, block->needed_by);
  block->needed_by.push_back({index, r.streams[index].enqueued});
  return true;
}

void useHostLink(c10::DeviceIndex device, bool to_host, size_t bytes) {
  static const double bytes_per_s = numberFromEnvironment("SIM_HOST_LINK_BYTES_PER_S", 0);
  if (bytes_per_s <= 0) {
    return;
  }
  static std::mutex links[16][2];
  std::lock_guard lock(links[device][to_host ? 1 : 0]);
  // The simulated link is slow.
  std::this_thread::sleep_for(std::chrono::duration<double>(static_cast<double>(bytes) / bytes_per_s));
}

void setStartDelay(double seconds) { start_delay_ns = static_cast<int64_t>(seconds * 1e9); }

void setStrict(bool strict) { is_strict = strict; }

double startDelay() { return static_cast<double>(start_delay_ns) / 1e9; }

void setMemoryLimit(c10::DeviceIndex device, size_t bytes) {
  checkDevice(device);
  auto& r = runtime();
  std::lock_guard lock(r.mutex);
  r.devices[device].limit_bytes = bytes;
}

void failNextTasks(c10::DeviceIndex device, int count) {
  checkDevice(device);
  runtime().devices[device].failing_tasks = count;
}

void failNextAllocations(c10::DeviceIndex device, int count) {
  checkDevice(device);
  auto& r = runtime();
  std::lock_guard lock(r.mutex);
  r.devices[device].failing_allocations = count;
}

void occupyStream(c10::Stream stream, double seconds) {
  enqueue(
      stream, "sleep", {},
      // The work under test is slow.
      [seconds](const auto&) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); },
      /*is_late=*/false);
}

std::shared_ptr<void> holdStream(c10::Stream stream) {
  std::promise<void> released;
  auto future = released.get_future().share();
  enqueue(stream, "hold", {}, [future](const auto&) { future.wait_for(std::chrono::minutes(1)); }, /*is_late=*/false);
  return std::make_shared<std::promise<void>>(std::move(released));  // which sets the future when it is destroyed
}

void noteConflict(const std::string& description) {
  auto& r = runtime();
  std::lock_guard lock(r.mutex);
  noteConflictLocked(r, description);
}

std::vector<std::string> takeConflicts() {
  auto& r = runtime();
  std::lock_guard lock(r.mutex);
  return std::exchange(r.conflicts, {});
}

int64_t executedTasks(c10::DeviceIndex device) {
  checkDevice(device);
  return runtime().devices[device].executed_tasks;
}

void stop() {
  if (!isInitialized()) {
    return;
  }
  auto& r = runtime();
  {
    std::lock_guard lock(r.mutex);
    r.is_stopped = true;
  }
  auto release = release_gil.load();
  auto released = release ? release() : nullptr;
  for (auto& stream : r.streams) {
    {
      std::lock_guard lock(stream.mutex);
      stream.should_stop = true;
    }
    stream.work_came.notify_all();
  }
  for (auto& stream : r.streams) {
    if (stream.thread.joinable()) {
      stream.thread.join();
    }
  }
}

void setReleaseGil(ReleaseGil release) { release_gil = release; }

}  // namespace simulated
