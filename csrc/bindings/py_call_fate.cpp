#include "bindings/py_call_fate.h"

#include <torch/csrc/utils/pythoncapi_compat.h>

#include <cstdlib>
#include <string_view>

#include "bindings/py_gil.h"
#include "bindings/py_log.h"

namespace torchrpc::bindings {

namespace {

std::string_view textOf(PyObject* string) {
  Py_ssize_t size = 0;
  const char* utf8 = PyUnicode_AsUTF8AndSize(string, &size);
  if (utf8) return {utf8, static_cast<size_t>(size)};
  PyErr_Clear();
  return {};
}

/// The folder of the package, whose frames are not the program's.
std::string_view packageFolder() {
  static const auto* const folder = [] {
    auto file = py::cast<std::string>(py::module_::import("torchrpc").attr("__file__"));
    return new std::string(file.substr(0, file.rfind('/') + 1));
  }();
  return *folder;
}

}  // namespace

bool areCallSitesKept() {
  static const bool kept = [] {
    const char* text = std::getenv("TORCHRPC_CALL_SITES");
    return text && std::string_view(text) == "1";
  }();
  return kept;
}

CallSite CallSite::here() {
  CallSite site;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame) {
    auto* const code = PyFrame_GetCode(frame);
    if (!textOf(code->co_filename).starts_with(packageFolder())) {
      site.code_ = code;
      site.line_ = PyFrame_GetLineNumber(frame);
      break;
    }
    Py_DECREF(code);
    auto* const outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  return site;
}

CallSite::~CallSite() {
  if (!code_ || isFinalizing()) return;
  const AcquireGil gil;
  Py_DECREF(code_);
}

std::string CallSite::text() const {
  if (!code_) return {};
  return std::string(textOf(code_->co_filename)) + ":" + std::to_string(line_);
}

CallFate::CallFate(const std::shared_ptr<Node>& node, std::string function, WorkerInfo worker)
    : node_(node), function_(std::move(function)), worker_(std::move(worker)) {
  if (areCallSitesKept()) site_ = CallSite::here();
}

void CallFate::requireItsProcess() const {
  if (const auto node = node_.lock()) node->requireItsProcess();
}

bool CallFate::cancel(CallId call) {
  onSeen();
  const auto node = node_.lock();
  return call != 0 && node && node->agent().cancel(call);
}

void CallFate::onFailed(const Error& error) {
  if (error.code() != ErrorCode::kShutdown) onFailed(error.text());
}

void CallFate::onFailed(std::string text) {
  error_ = std::move(text);
  add(kFailed);
}

void CallFate::add(uint8_t flag) {
  const auto before = flags_.fetch_or(flag, std::memory_order_acq_rel);
  if ((before & flag) == 0 && (before | flag) == (kDropped | kFailed)) report();
}

void CallFate::report() {
  const auto node = node_.lock();
  if (!node || isFinalizing() || !node->agent().isInItsProcess() || node->agent().isClosing()) return;
  std::string made_at;
  if (areCallSitesKept()) {
    const AcquireGil gil;
    made_at = site_.text();
  }
  const auto self = node->self().name;
  LogRecord record{
      .text = "nobody waited for the call of " + function_ + " on " + worker_.name + " that " + self + " made" +
          (made_at.empty() ? "" : " at " + made_at) + ", and it failed: " + error_,
      .worker = self,
      .peer = worker_.name,
      .function = function_,
      .made_at = std::move(made_at)};
  // On the strand, because this may be called by a destructor, which must not run the program's handlers of log
  // records.
  node->agent().postToStrand([record = std::move(record)] {
    if (isFinalizing()) return;
    const AcquireGil gil;
    logInPython(record);
  });
}

}  // namespace torchrpc::bindings
