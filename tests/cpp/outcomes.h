#pragma once

// Shared by the tests of all layers: the error that a function throws, and a wait for what other threads do.

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

/// Whether a condition becomes true within 20 s.
template <typename Condition>
bool eventually(Condition&& condition) {
  for (int i = 0; i < 20000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

}  // namespace torchrpc::test
