#include "bindings/py_log.h"

#include <deque>
#include <optional>
#include <thread>
#include <utility>

#include "base/process.h"
#include "base/sync/mutex.h"
#include "bindings/bind.h"
#include "bindings/py_errors.h"
#include "bindings/py_gil.h"

namespace torchrpc::bindings {

namespace {

constexpr auto kPatience = std::chrono::seconds(1);

/// A queue of records for Python. Two threads start with the first record: one passes records to Python, the other
/// writes records that Python has not received in time to standard error.
class PythonLog {
 public:
  /// Returns the log of the process. Its threads end at the interpreter's end.
  static PythonLog& get() {
    static auto* const only = new PythonLog();  // NOLINT(cppcoreguidelines-owning-memory)
    return *only;
  }

  void push(LogRecord record) {
    if (!maker_.isThisOne() || !tryPush(record)) logToStandardError(record.level, record.text);
  }

  /// Passes the remaining records to Python and stops the threads. Must be called without the GIL.
  void end() {
    if (!maker_.isThisOne()) return;
    {
      MutexLock lock(mutex_);
      if (std::exchange(has_ended_, true)) return;
    }
    changed_.notify_all();
    if (!taker_.joinable()) return;
    taker_.join();
    watcher_.join();
  }

 private:
  struct Entry {
    LogRecord record;
    TimePoint due;
  };

  /// Returns false, and leaves the record as it is, if the log has ended.
  bool tryPush(LogRecord& record) {
    {
      MutexLock lock(mutex_);
      if (has_ended_) return false;
      if (!taker_.joinable()) {
        taker_ = std::thread([this] { takeToPython(); });
        watcher_ = std::thread([this] { watch(); });
      }
      records_.push_back({std::move(record), std::chrono::steady_clock::now() + kPatience});
    }
    changed_.notify_all();
    return true;
  }

  void takeToPython() {
    while (waitForRecord(false)) {
      const AcquireGil gil;
      while (const auto record = takeFirst(TimePoint::max())) logInPython(*record);
    }
  }

  void watch() {
    while (waitForRecord(true)) {
      while (const auto record = takeFirst(std::chrono::steady_clock::now())) {
        logToStandardError(record->level, record->text);
      }
    }
  }

  /// Waits for a record; with `until_due`, waits also until the first record is due or the queue changes. Returns false
  /// if the log has ended and the queue is empty.
  bool waitForRecord(bool until_due) {
    MutexLock lock(mutex_);
    changed_.wait(lock, [this]() TORCHRPC_REQUIRES(mutex_) { return has_ended_ || !records_.empty(); });
    if (records_.empty()) return false;
    if (until_due) changed_.wait_until(lock, records_.front().due);
    return true;
  }

  /// Removes and returns the first record, if it is due by `by`.
  std::optional<LogRecord> takeFirst(TimePoint by) {
    std::optional<LogRecord> taken;
    MutexLock lock(mutex_);
    if (records_.empty() || records_.front().due > by) return taken;
    taken = std::move(records_.front().record);
    records_.pop_front();
    if (records_.empty()) changed_.notify_all();
    return taken;
  }

  const MakerProcess maker_;
  Mutex mutex_;
  CondVar changed_;
  bool has_ended_ TORCHRPC_GUARDED_BY(mutex_) = false;
  std::deque<Entry> records_ TORCHRPC_GUARDED_BY(mutex_);
  std::thread taker_, watcher_;  ///< started under the lock, joined by end()
};

}  // namespace

SlowCalls::Reporter slowCallReporter() {
  return [](const std::vector<SlowCall>& calls) {
    for (const auto& call : calls) {
      PythonLog::get().push(
          {.text = describe(call),
           .worker = call.worker,
           .peer = call.peer,
           .function = call.function,
           .age_s = std::chrono::duration<double>(call.age).count(),
           .thread = call.thread});
    }
  };
}

void logInPython(const LogRecord& record) try {
  internalFunction("log_record")(
      std::string(name(record.level)), record.text, record.worker, record.peer, record.function, record.age_s,
      record.made_at, record.thread);
} catch (py::error_already_set& e) {
  e.discard_as_unraisable("a handler of Python's logging");
} catch (const std::exception&) {
  logToStandardError(record.level, record.text);
}

void bindLog(py::module_& module) {
  module.def("_log_to_python", [] {
    setLogSink([](LogLevel level, const std::string& text) { PythonLog::get().push({.text = text, .level = level}); });
  });
  module.def("_end_log", [] { PythonLog::get().end(); }, py::call_guard<py::gil_scoped_release>());
}

}  // namespace torchrpc::bindings
