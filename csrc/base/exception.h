#pragma once

// Converts exceptions of foreign code (user code, torch, the standard library) to Errors.

#include <exception>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/os/forced_unwind.h"

namespace torchrpc {

/// Returns what(); for a c10::Error, without the backtrace.
std::string textOf(const std::exception& exception);

/// Converts the exception to an Error. An Error keeps its code, worker and detail. Any other exception becomes an Error
/// with `code`, `worker` and its type; its text is that of textOf(), or names the type if it is no std::exception.
/// `context` is put before the text in all cases. `raised` must not be null.
Error errorFromException(
    const std::exception_ptr& raised, ErrorCode code, const std::string& worker = {}, const std::string& context = {});

/// Runs `body`. If it throws, calls `fail` with the exception as an Error: see errorFromException(). The exception of
/// pthread_exit() passes through: Python ends threads in this way when it exits.
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
