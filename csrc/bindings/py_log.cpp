#include "bindings/py_log.h"

#include <deque>
#include <utility>

#include "base/log.h"
#include "base/sync/mutex.h"
#include "bindings/py_errors.h"
#include "bindings/py_gil.h"

namespace torchrpc::bindings {

namespace {

/// Records on their way to Python.
class SlowCallLog : public std::enable_shared_from_this<SlowCallLog> {
 public:
  /// On the timer, once a second.
  void report(Messenger& messenger, const std::vector<SlowCall>& calls) {
    std::deque<LogRecord> late;
    {
      MutexLock lock(mutex_);
      late.swap(records_);  // those of the last second
      for (const auto& call : calls) {
        records_.push_back(
            {.text = describe(call),
             .worker = call.worker,
             .peer = call.peer,
             .function = call.function,
             .age_s = std::chrono::duration<double>(call.age).count()});
      }
    }
    for (const auto& record : late) log(LogLevel::kWarning, record.text);
    if (calls.empty()) return;
    messenger.post([self = shared_from_this()] { self->write(); });
  }

 private:
  void write() {
    if (isFinalizing()) return;
    const AcquireGil gil;
    for (;;) {
      LogRecord record;
      {
        MutexLock lock(mutex_);
        if (records_.empty()) return;
        record = std::move(records_.front());
        records_.pop_front();
      }
      logInPython(record);
    }
  }

  Mutex mutex_;
  std::deque<LogRecord> records_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace

SlowCalls::Reporter slowCallReporter() {
  return [log = std::make_shared<SlowCallLog>()](Messenger& messenger, const std::vector<SlowCall>& calls) {
    log->report(messenger, calls);
  };
}

void logInPython(const LogRecord& record) try {
  internalFunction("log_call")(record.text, record.worker, record.peer, record.function, record.age_s, record.made_at);
} catch (py::error_already_set& e) {
  e.discard_as_unraisable("a handler of Python's logging");
} catch (const std::exception&) {
  log(LogLevel::kWarning, record.text);
}

}  // namespace torchrpc::bindings
