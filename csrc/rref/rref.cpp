#include "rref/rref.h"

#include "base/executor/thread_pool.h"
#include "base/sync/interrupt.h"
#include "calls/thread_record.h"
#include "device/streams.h"
#include "rref/rref_service.h"

namespace torchrpc {

namespace {

thread_local std::shared_ptr<const std::string> current_origin;

/// Called on the thread that gets the value: its current streams wait for the work that computes the value.
void prepareUse(const Result<c10::IValue>& settled, const StreamEventsPtr& computed) {
  if (!computed) return;
  UsedDevices::waitFor(computed);
  if (settled) StreamScope::keep(settled.value());
}

}  // namespace

const std::shared_ptr<const std::string>& currentOrigin() { return current_origin; }

OriginScope::OriginScope(std::shared_ptr<const std::string> origin)
    : outer_(std::exchange(current_origin, std::move(origin))) {}

OriginScope::~OriginScope() { current_origin = std::move(outer_); }

bool OwnerRRef::setValue(c10::IValue value) { return settle(std::move(value)); }

bool OwnerRRef::setError(Error error) { return settle(std::move(error)); }

bool OwnerRRef::settle(Result<c10::IValue> result) {
  std::vector<ValueHandler> handlers;
  const Result<c10::IValue>* settled = nullptr;
  auto computed = result ? UsedDevices::record() : nullptr;
  {
    MutexLock lock(mutex_);
    if (result_) return false;
    settled = &result_.emplace(std::move(result));
    computed_ = std::move(computed);
    handlers.swap(handlers_);
  }
  settled_.notify_all();
  for (const auto& handler : handlers) handler(*settled);
  return true;
}

Status OwnerRRef::creationFailure() const {
  MutexLock lock(mutex_);
  if (!result_ || result_->ok()) return std::nullopt;
  const auto code = result_->error().code();
  const bool is_creation = code == ErrorCode::kRRefCreation || code == ErrorCode::kRRefCreationTimeout;
  return is_creation ? Status(result_->error()) : std::nullopt;
}

std::optional<Result<c10::IValue>> OwnerRRef::result() const {
  StreamEventsPtr computed;
  std::optional<Result<c10::IValue>> result;
  {
    MutexLock lock(mutex_);
    computed = computed_;
    result = result_;
  }
  if (result) prepareUse(*result, computed);
  return result;
}

void OwnerRRef::whenReady(ValueHandler handler) {
  const Result<c10::IValue>* settled = nullptr;
  StreamEventsPtr computed;
  {
    MutexLock lock(mutex_);
    if (!result_) {
      handlers_.push_back(std::move(handler));
      return;
    }
    settled = &*result_;
    computed = computed_;
  }
  prepareUse(*settled, computed);
  handler(*settled);
}

c10::IValue OwnerRRef::wait(Duration timeout) const {
  ThreadPool::BlockingScope blocking;
  const auto ready = [this]() TORCHRPC_REQUIRES(mutex_) { return result_.has_value(); };
  const Result<c10::IValue>* settled = nullptr;
  StreamEventsPtr computed;
  {
    MutexLock lock(mutex_);
    const auto deadline = deadlineAfter(timeout);
    std::optional<WaitScope> waiting;
    if (!ready()) {
      ThreadWait record{.kind = ThreadWait::Kind::kValue, .to = owner().id};
      record.setText("RRef " + toString(id()));
      waiting.emplace(record);
    }
    if (!waitInterruptibly(settled_, lock, deadline, ready)) {
      throw Error(
          ErrorCode::kTimeout, "RRef " + toString(id()) + " has no value yet, and the timeout has passed.",
          owner().name);
    }
    settled = &*result_;
    computed = computed_;
  }
  prepareUse(*settled, computed);
  return Result(*settled).take();
}

UserRRef::~UserRRef() {
  if (auto service = service_.lock()) service->release(*this);
}

bool UserRRef::confirmed() const {
  MutexLock lock(mutex_);
  return state_ == State::kConfirmed;
}

void UserRRef::whenConfirmed(ConfirmedHandler handler) {
  Status failure;
  {
    MutexLock lock(mutex_);
    if (state_ == State::kPending) {
      handlers_.push_back(std::move(handler));
      return;
    }
    failure = failure_;
  }
  handler(failure);
}

Status UserRRef::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

bool UserRRef::deleted() const {
  MutexLock lock(mutex_);
  return deleted_;
}

void UserRRef::settle(const Status& failure) {
  std::vector<ConfirmedHandler> handlers;
  {
    MutexLock lock(mutex_);
    if (state_ == State::kFailed || (state_ == State::kConfirmed && !failure)) return;
    state_ = failure ? State::kFailed : State::kConfirmed;
    failure_ = failure;
    handlers.swap(handlers_);
  }
  for (const auto& handler : handlers) handler(failure);
}

bool UserRRef::reopen(uint64_t registration, const PeerId& owner) {
  MutexLock lock(mutex_);
  if (deleted_ || state_ != State::kFailed || failure_->code() != ErrorCode::kWorkerLost) return false;
  if (owner_incarnation_ >= owner.incarnation) return false;
  registration_ = registration;
  owner_incarnation_ = owner.incarnation;
  state_ = State::kPending;
  failure_ = std::nullopt;
  return true;
}

bool UserRRef::markDeleted() {
  MutexLock lock(mutex_);
  return !std::exchange(deleted_, true);
}

}  // namespace torchrpc
