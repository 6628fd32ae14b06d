#include "profiling/range.h"

#include <torch/csrc/profiler/api.h>

#include <unordered_map>

#include "base/sync/mutex.h"

namespace torchrpc {

bool legacyProfileHere() {
  return torch::profiler::impl::profilerType() == torch::profiler::impl::ActiveProfilerType::LEGACY;
}

namespace trace_detail {
std::atomic<bool> on{false};
}

namespace {

// Note [Ranges that outlive a trace]
// torch's profiler of all threads frees its events when it stops, and a range that ended later would write to one. So
// the ranges in a trace are listed here, and who takes one off the list ends it: its owner, or stopTrace(). `busy`
// counts those who are beginning or ending one at the moment.
struct OpenRanges {
  Mutex mutex;
  CondVar changed;
  // guarded by mutex:
  std::unordered_map<Range*, std::shared_ptr<Range>> ranges;
  size_t serving = 0;  ///< callees' ones among them
  size_t busy = 0;

  void add(const std::shared_ptr<Range>& range) {
    ranges.emplace(range.get(), range);
    if (range->side() == Range::Side::kCallee) ++serving;
    ++busy;
  }
  /// Null if it is not there any more.
  std::shared_ptr<Range> take(Range* range) {
    auto node = ranges.extract(range);
    if (node.empty()) return nullptr;
    if (range->side() == Range::Side::kCallee) --serving;
    ++busy;
    return std::move(node.mapped());
  }
};

OpenRanges& open() {
  static auto& ranges = *new OpenRanges();  // threads may end ranges while the process exits
  return ranges;
}

/// Begins or ends a range in the trace: `step` runs under no lock, but stopTrace() waits for it.
template <typename Step>
void whileBusy(const Step& step) {
  step();
  {
    MutexLock lock(open().mutex);
    --open().busy;
  }
  open().changed.notify_all();
}

// Note [The number of a range]
// Of what a range can carry, torch's profiler always shows the sequence number, which is autograd's otherwise. It holds
// the id of the call and the side: worker + 1, 41 bits of the counter, 1 bit for the callee. It stays exact in programs
// that read JSON's numbers as doubles, for the first 2,047 workers.
constexpr uint64_t kCounter = (uint64_t{1} << 41) - 1;

thread_local std::shared_ptr<Range> expected_call;
thread_local Range* serving_here = nullptr;

}  // namespace

void startTrace() { trace_detail::on = true; }

void stopTrace(Duration patience) {
  if (auto* range = serving_here) range->end();
  decltype(OpenRanges::ranges) rest;
  {
    MutexLock lock(open().mutex);
    trace_detail::on = false;
    open().changed.wait_for(lock, patience, [] { return open().serving == 0; });
    open().changed.wait(lock, [] { return open().busy == 0; });
    rest.swap(open().ranges);
    open().serving = 0;
  }
  for (const auto& [_, range] : rest) range->finish();
}

Range::Range(std::string name, const GloballyUniqueId& id, Side side) : name_(std::move(name)), id_(id), side_(side) {}

Range::~Range() {
  if (serving_here == this) serving_here = nullptr;
}

std::shared_ptr<Range> Range::begin(const std::string& name, const GloballyUniqueId& id, Side side) {
  const bool legacy = side == Side::kCaller && legacyProfileHere();
  if (!legacy && !traceIsOn()) return nullptr;
  std::shared_ptr<Range> range(new Range(name, id, side));
  if (legacy) {
    range->profile_ = c10::ThreadLocalDebugInfo::current();
    range->record();
    return range;
  }
  {
    MutexLock lock(open().mutex);
    if (!traceIsOn()) return nullptr;
    open().add(range);
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
  const auto number = static_cast<int64_t>(id_.local_id & kCounter);
  return (static_cast<int64_t>(id_.created_on + 1) << 42) | (number << 1) | (side_ == Side::kCallee ? 1 : 0);
}

void Range::record() {
  record_ = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  if (side_ == Side::kCaller) record_->_setAsync();  // it need not nest with what else the thread does
  record_->before(std::string_view(name_), sequenceNumber());
}

void Range::end() {
  if (serving_here == this) serving_here = nullptr;
  std::shared_ptr<Range> mine;
  if (in_trace_) {
    MutexLock lock(open().mutex);
    mine = open().take(this);
  }
  // If another thread is ending it, its end must be recorded when this returns.
  if (mine) {
    whileBusy([&] { finish(); });
  } else {
    finish();
  }
}

void Range::finish() {
  const c10::DebugInfoGuard guard(profile_);  // null: changes nothing
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
