#include "bindings/py_stacks.h"

#include <atomic>
#include <charconv>
#include <dlfcn.h>
#include <sstream>
#include <string_view>

#include "base/executor/task_thread.h"
#include "base/log.h"
#include "base/os/process_copy.h"
#include "base/sync/waiter.h"
#include "bindings/py_gil.h"
#include "calls/thread_record.h"

namespace torchrpc::bindings {

namespace {

using c10::IValue;

/// Converts plain data: None, bool, int, float, str, lists, and dicts with str keys. Other objects become None.
IValue toPlainValue(const py::handle& object) {
  if (PyBool_Check(object.ptr())) return py::cast<bool>(object);
  if (PyLong_Check(object.ptr())) return py::cast<int64_t>(object);
  if (PyFloat_Check(object.ptr())) return py::cast<double>(object);
  if (PyUnicode_Check(object.ptr())) return py::cast<std::string>(object);
  if (PyList_Check(object.ptr())) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const auto each : py::reinterpret_borrow<py::list>(object)) list.push_back(toPlainValue(each));
    return list;
  }
  if (PyDict_Check(object.ptr())) {
    c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(object)) {
      dict.insert(py::cast<std::string>(key), toPlainValue(value));
    }
    return dict;
  }
  return {};
}

// --- without the GIL ---

/// A function of CPython that reads the stacks of all threads without the GIL, for faulthandler. CPython 3.10 and 3.13
/// and later do not export it.
using DumpStacks = const char* (*)(int fd, void* interpreter, void* current);
DumpStacks dumpStacks() {
  static const auto function = reinterpret_cast<DumpStacks>(::dlsym(RTLD_DEFAULT, "_Py_DumpTracebackThreads"));
  return function;
}

c10::impl::GenericDict emptyThread(uint64_t ident) {
  c10::impl::GenericDict thread(c10::AnyType::get(), c10::AnyType::get());
  thread.insert("ident", static_cast<int64_t>(ident));
  thread.insert("native_id", int64_t{0});
  thread.insert("python", c10::impl::GenericList(c10::AnyType::get()));
  thread.insert("lock", IValue());
  return thread;
}

/// Parses `  File "/x/train.py", line 3 in step`; returns None for any other line.
IValue frameOf(const std::string& line) {
  constexpr std::string_view kBegin = "  File \"";
  const auto end = line.rfind("\", line ");
  if (!line.starts_with(kBegin) || end == std::string::npos || end < kBegin.size()) return {};
  const auto number = end + std::string_view("\", line ").size();
  int64_t at = 0;
  const auto [rest, error] = std::from_chars(line.data() + number, line.data() + line.size(), at);
  constexpr std::string_view kIn = " in ";
  const auto function = line.find(kIn, static_cast<size_t>(rest - line.data()));
  if (error != std::errc() || function == std::string::npos) return {};
  c10::impl::GenericDict frame(c10::AnyType::get(), c10::AnyType::get());
  frame.insert("file", line.substr(kBegin.size(), end - kBegin.size()));
  frame.insert("line", at);
  frame.insert("function", line.substr(function + kIn.size()));
  return frame;
}

/// Parses the text that dumpStacks() writes: returns its threads.
IValue threadsIn(const std::string& text) {
  c10::impl::GenericList threads(c10::AnyType::get());
  std::istringstream lines(text);
  constexpr std::string_view kThread = "hread 0x";  // "Thread 0x...", "Current thread 0x..."
  IValue frames;
  for (std::string line; std::getline(lines, line);) {
    if (const auto at = line.find(kThread); at != std::string::npos && !line.starts_with(' ')) {
      uint64_t ident = 0;
      std::from_chars(line.data() + at + kThread.size(), line.data() + line.size(), ident, 16);
      const auto thread = emptyThread(ident);
      frames = thread.at("python");
      threads.push_back(thread);
    } else if (auto frame = frameOf(line); frames.isList() && !frame.isNone()) {
      frames.toList().push_back(std::move(frame));
    }
  }
  return threads;
}

IValue stacksWithoutGil() {
  if (!dumpStacks()) return c10::impl::GenericList(c10::AnyType::get());
  constexpr size_t kMostBytes = 1 << 20;
  const auto write = [](int fd) { dumpStacks()(fd, nullptr, nullptr); };
  return threadsIn(os::outputOfCopy(write, kMostBytes, std::chrono::seconds(1)));
}

// --- with the GIL ---

IValue stacksWithGil() {
  keepPythonState();
  const AcquireGil gil;
  try {
    py::dict native_ids;
    for (const auto& thread : ThreadRecord::all()) {
      if (thread.ident != 0) native_ids[py::int_(thread.ident)] = thread.thread;
    }
    return toPlainValue(py::module_::import("torchrpc.observe._stacks").attr("collect")(native_ids));
  } catch (const std::exception& e) {
    log(LogLevel::kWarning, std::string("the stacks of Python threads could not be read: ") + e.what());
    return c10::impl::GenericList(c10::AnyType::get());
  }
}

class PythonStacks final : public Inspector::StackSource {
 public:
  Inspector::Stacks collect(Duration limit) override {
    const auto begin = std::chrono::steady_clock::now();
    if (!is_waiting_.exchange(true)) {
      const auto read = std::make_shared<Waiter<IValue>>();
      if (!thread_) thread_ = std::make_unique<TaskThread>("that reads Python's stacks");
      thread_->post([this, read] {
        auto stacks = stacksWithGil();
        is_waiting_ = false;
        read->set(std::move(stacks));
      });
      if (auto stacks = read->waitFor(limit)) {
        return {.waited = std::chrono::steady_clock::now() - begin, .threads = *std::move(stacks)};
      }
    }
    // The reading thread still waits for the GIL. It gets no further task before it has acquired the GIL.
    return {.is_free = false, .waited = std::chrono::steady_clock::now() - begin, .threads = stacksWithoutGil()};
  }

  void stop() override {
    if (thread_) thread_->stop();
  }

 private:
  std::atomic<bool> is_waiting_{false};
  // Used by the inspector's thread, then by stop():
  std::unique_ptr<TaskThread> thread_;
};

}  // namespace

std::shared_ptr<Inspector::StackSource> makeStackSource() { return std::make_shared<PythonStacks>(); }

}  // namespace torchrpc::bindings
