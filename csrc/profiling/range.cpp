#include "profiling/range.h"

#include <torch/csrc/profiler/api.h>

#include <unordered_map>

#include "base/sync/fork_safe_mutex.h"

namespace torchrpc {

bool isLegacyProfileOn() {
  return torch::profiler::impl::profilerType() == torch::profiler::impl::ActiveProfilerType::LEGACY;
}

namespace trace_detail {
std::atomic<bool> on{false};
}

namespace {

// Note [Ranges that outlive a trace]
// torch's profiler of all threads frees its events when it stops, and a range that ended later would write to freed
// memory. So this list contains all open ranges of a trace. The thread that removes a range from the list ends the
// range: the thread that calls Range::end(), or the thread in stopTrace(). `busy` counts the ranges that threads are
// beginning or ending.
struct OpenRanges {
  ForkSafeMutex mutex;
  CondVar changed;
  std::unordered_map<Range*, std::shared_ptr<Range>> ranges TORCHRPC_GUARDED_BY(mutex);
  size_t serving TORCHRPC_GUARDED_BY(mutex) = 0;  ///< the ranges of callees in `ranges`
  size_t busy TORCHRPC_GUARDED_BY(mutex) = 0;

  void add(const std::shared_ptr<Range>& range) TORCHRPC_REQUIRES(mutex) {
    ranges.emplace(range.get(), range);
    if (range->side() == Range::Side::kCallee) ++serving;
    ++busy;
  }
  /// Removes the range and returns it; null if it was removed before.
  std::shared_ptr<Range> take(Range* range) TORCHRPC_REQUIRES(mutex) {
    auto node = ranges.extract(range);
    if (node.empty()) return nullptr;
    if (range->side() == Range::Side::kCallee) --serving;
    ++busy;
    return std::move(node.mapped());
  }
};

// Never destroyed: threads may end ranges while the process exits.
auto& open_ranges = *new OpenRanges();

/// Begins or ends a range in the trace: `step` runs under no lock, but stopTrace() waits for it.
template <typename Step>
void whileBusy(const Step& step) {
  step();
  {
    MutexLock lock(open_ranges.mutex);
    --open_ranges.busy;
  }
  open_ranges.changed.notify_all();
}

// Note [The number of a range]
// torch's profiler always shows the sequence number of a range, which otherwise comes from autograd. Here it encodes
// the id of the call and the side: worker + 1, 41 bits of the counter, 1 bit for the callee. For the first 2,047
// workers it stays exact in programs that read the numbers of JSON as doubles.
constexpr uint64_t kCounterMask = (uint64_t{1} << 41) - 1;

thread_local std::shared_ptr<Range> expected_call;
thread_local Range* serving_here = nullptr;

}  // namespace

void startTrace() { trace_detail::on = true; }

void stopTrace(Duration timeout) {
  if (auto* range = serving_here) range->end();
  decltype(OpenRanges::ranges) rest;
  {
    MutexLock lock(open_ranges.mutex);
    trace_detail::on = false;
    open_ranges.changed.wait_for(
        lock, timeout, []() TORCHRPC_REQUIRES(open_ranges.mutex) { return open_ranges.serving == 0; });
    open_ranges.changed.wait(lock, []() TORCHRPC_REQUIRES(open_ranges.mutex) { return open_ranges.busy == 0; });
    rest.swap(open_ranges.ranges);
    open_ranges.serving = 0;
  }
  for (const auto& [_, range] : rest) range->finish();
}

Range::Range(std::string name, const GloballyUniqueId& id, Side side) : name_(std::move(name)), id_(id), side_(side) {}

Range::~Range() {
  if (serving_here == this) serving_here = nullptr;
}

std::shared_ptr<Range> Range::begin(const std::string& name, const GloballyUniqueId& id, Side side) {
  const bool legacy = side == Side::kCaller && isLegacyProfileOn();
  if (!legacy && !isTraceOn()) return nullptr;
  std::shared_ptr<Range> range(new Range(name, id, side));
  if (legacy) {
    range->profile_ = c10::ThreadLocalDebugInfo::current();
    range->record();
    return range;
  }
  {
    MutexLock lock(open_ranges.mutex);
    if (!isTraceOn()) return nullptr;
    open_ranges.add(range);
    range->in_trace_ = true;
  }
  whileBusy([&] { range->record(); });
  if (side == Side::kCallee) serving_here = range.get();
  return range;
}

std::shared_ptr<Range> Range::named(std::string name) {
  std::shared_ptr<Range> range(new Range(std::move(name), {}, Side::kCaller));
  range->profile_ = c10::ThreadLocalDebugInfo::current();
  return range;
}

int64_t Range::sequenceNumber() const {
  const auto number = static_cast<int64_t>(id_.local_id & kCounterMask);
  return (static_cast<int64_t>(id_.created_on + 1) << 42) | (number << 1) | (side_ == Side::kCallee ? 1 : 0);
}

void Range::record() {
  record_ = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  if (side_ == Side::kCaller) record_->_setAsync();  // the range need not nest in the others of its thread
  record_->before(std::string_view(name_), sequenceNumber());
}

void Range::end() {
  if (serving_here == this) serving_here = nullptr;
  std::shared_ptr<Range> mine;
  if (in_trace_) {
    MutexLock lock(open_ranges.mutex);
    mine = open_ranges.take(this);
  }
  // If another thread is ending the range, finish() waits until the end is recorded.
  if (mine) {
    whileBusy([&] { finish(); });
  } else {
    finish();
  }
}

void Range::finish() {
  const c10::DebugInfoGuard guard(profile_);  // a null profile changes nothing
  std::function<void()> then;
  std::call_once(ended_, [&] {
    record_.reset();
    then.swap(then_);
  });
  if (then) then();
}

void Range::whenEnded(std::function<void()> then) { then_ = std::move(then); }

std::shared_ptr<Range> Range::expectCall(std::shared_ptr<Range> range) {
  return std::exchange(expected_call, std::move(range));
}

const std::shared_ptr<Range>& Range::expectedCall() { return expected_call; }

std::shared_ptr<Range> Range::holdExpectedCall() {
  if (expected_call) expected_call->held_ = true;
  return expected_call;
}

}  // namespace torchrpc
