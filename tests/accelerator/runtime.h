// The runtime of the simulated accelerator: devices, streams, events and memory. It knows no operator.
//
// Device memory is host memory, and each stream is a thread that executes a queue of tasks, each at least start_delay_s
// after it was enqueued. So the host runs ahead of the device, as with a real accelerator.
//
// Note [Ordering]
// A test of synchronization must fail whenever synchronization is missing, not only when threads happen to interleave
// badly. So the runtime also tracks what is ordered before what, as a race detector does:
//  - Each stream has a vector clock: for each stream, the last of its tasks that is ordered before the next task of
//  this
//    one. Recording an event copies the clock; waiting for the event merges the copy.
//  - Each task declares the ranges of memory that it reads and writes; copies declare those of the host, too.
// Two accesses of which one writes conflict unless one is ordered before the other, by the clocks or because it had
// completed when the other was enqueued. A task that reads (or overwrites) what an unordered task writes gets poison
// (bytes 0xff: NaN) as its result, whatever the threads do; so does a task that is overtaken by the reuse of memory.
// Each conflict is also described in a list (takeConflicts).
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace simulated {

constexpr unsigned char kPoison = 0xff;
constexpr c10::StreamId kPoolStreams = 32;  // of each of the two priorities
constexpr c10::StreamId kStreams = 1 + 2 * kPoolStreams;

// A task of the stream with the index `stream`: the `number`th one, from 1.
struct TaskId {
  int stream = 0;
  uint64_t number = 0;
};

struct Access {
  const char* begin = nullptr;
  size_t bytes = 0;
  bool is_write = false;
};

// What a task does. It must look at `is_poisoned` when it has written its result, and if that is true, write poison.
using Work = std::function<void(const std::atomic<bool>& is_poisoned)>;

class Event;  // a c10::Event's state

// Throws in a child process that was forked after the first use of a device.
void checkUsable();
bool isInBadFork() noexcept;
bool isInitialized() noexcept;

int deviceCount() noexcept;
c10::DeviceIndex currentDevice() noexcept;  // of this thread
c10::DeviceIndex exchangeDevice(c10::DeviceIndex device);
void setDeviceUnchecked(c10::DeviceIndex device) noexcept;

c10::Stream currentStream(c10::DeviceIndex device);
c10::Stream exchangeStream(c10::Stream stream);
c10::Stream defaultStream(c10::DeviceIndex device);
c10::Stream streamFromPool(c10::DeviceIndex device, bool is_high_priority);

// `label` names the task in descriptions of conflicts. A task that is not late starts as soon as the one before it
// ends.
TaskId enqueue(c10::Stream stream, const char* label, std::vector<Access> accesses, Work work, bool is_late = true);
// The following wait without the GIL. They throw the error of a task that failed before, once.
void waitForTask(TaskId task);
bool isStreamIdle(c10::Stream stream);
void synchronizeStream(c10::Stream stream);
void synchronizeDevice(c10::DeviceIndex device);

void recordEvent(void** event, c10::Stream stream, c10::DeviceIndex device);
void waitForEvent(void* event, c10::Stream stream);
bool isEventComplete(void* event);
void synchronizeEvent(void* event);
double elapsedMilliseconds(void* start, void* end);
void destroyEvent(void* event) noexcept;

// Device memory of the current device and stream.
c10::DataPtr allocate(size_t bytes);
// Memory for other processes of this machine: a handle of the allocation that has the byte at `pointer`, and where in
// it.
struct SharedMemory {
  std::string handle;
  uint64_t offset = 0;
};
SharedMemory exportMemory(const void* pointer);
// Maps the allocation of another process as memory of a device, which no order with that process's work protects.
struct OpenedBlock {
  void* base = nullptr;
  uint64_t bytes = 0;
};
OpenedBlock openMemory(c10::DeviceIndex device, const std::string& handle);
void closeMemory(void* base);
void recordStream(const c10::DataPtr& memory, c10::Stream stream);
c10::DeviceIndex deviceOfPointer(const void* pointer);  // -1: no device memory
// Where tasks access the device memory at `pointer`, which nobody else may access.
char* memoryForTasks(const void* pointer);
// Copies device memory in a task of the current stream of the current device.
void copyMemory(void* to, const void* from, size_t bytes);
size_t allocatedBytes(c10::DeviceIndex device);
size_t peakAllocatedBytes(c10::DeviceIndex device);
void resetPeakAllocatedBytes(c10::DeviceIndex device);
size_t memoryLimitBytes(c10::DeviceIndex device);

// Occupies the calling stream's thread for as long as the link between device and host needs for the bytes, if it has a
// rate (SIM_HOST_LINK_BYTES_PER_S). One copy at a time uses the link in each direction.
void useHostLink(c10::DeviceIndex device, bool to_host, size_t bytes);

// Whether a copy of this memory of the host is under way.
bool isHostMemoryInUse(const void* pointer, size_t bytes);
c10::DataPtr allocatePinned(size_t bytes);
bool isPinned(const void* pointer);
// Keeps a block of pinned memory until the stream has executed what is enqueued; false if it is no pinned memory.
bool recordPinned(const void* pointer, c10::Stream stream);

// For tests.
void setStartDelay(double seconds);
double startDelay();
void setStrict(bool strict);  // whether a conflict makes a result poison
void setMemoryLimit(c10::DeviceIndex device, size_t bytes);
void failNextTasks(c10::DeviceIndex device, int count);
void failNextAllocations(c10::DeviceIndex device, int count);
void occupyStream(c10::Stream stream, double seconds);
// Occupies the stream until the result is destroyed, or for a minute.
std::shared_ptr<void> holdStream(c10::Stream stream);
void noteConflict(const std::string& description);
std::vector<std::string> takeConflicts();
int64_t executedTasks(c10::DeviceIndex device);

// Executes what is enqueued and ends all threads; from then on tasks are executed by the threads that enqueue them.
void stop();

// Called around each wait, so that the bindings can release the GIL: returns what releases it until it is destroyed.
using ReleaseGil = std::shared_ptr<void> (*)();
void setReleaseGil(ReleaseGil release);

}  // namespace simulated
