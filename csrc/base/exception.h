#pragma once

// What foreign code throws (user code, torch, the standard library) as an Error.

#include <exception>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/os/forced_unwind.h"

namespace torchrpc {

/// what(), but of a c10::Error without the backtrace.
std::string textOf(const std::exception& exception);

/// The exception as an Error. An Error keeps its code, worker and detail. Any other exception gets `code` and `worker`;
/// its text is what() (of a c10::Error without the backtrace), or "unknown exception" if it has none. `context` is put
/// before the text of all. `raised` must not be null.
Error errorFromException(
    const std::exception_ptr& raised, ErrorCode code, const std::string& worker = {}, const std::string& context = {});

/// Runs `body` and calls `fail` with what it throws, see errorFromException(). pthread_exit() unwinds through it:
/// Python ends threads in this way when it exits.
template <typename Body, typename Fail>
void runOrFail(Body&& body, Fail&& fail, ErrorCode code, const std::string& worker = {}) {
  try {
    std::forward<Body>(body)();
  } catch (const os::ForcedUnwind&) {
    throw;
  } catch (...) {
    std::forward<Fail>(fail)(errorFromException(std::current_exception(), code, worker));
  }
}

}  // namespace torchrpc
