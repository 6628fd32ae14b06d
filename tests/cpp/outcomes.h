#pragma once

// What tests of several layers wait for: the error that something throws, and what other threads are about to do.

#include <chrono>
#include <thread>

#include "base/error.h"

namespace torchrpc::test {

/// The error that `body` throws.
template <typename F>
Error errorOf(F&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  return {ErrorCode::kUnknown, "no error"};
}

/// Whether a condition comes true within 20 s.
template <typename Condition>
bool eventually(Condition&& condition) {
  for (int i = 0; i < 20000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

}  // namespace torchrpc::test
