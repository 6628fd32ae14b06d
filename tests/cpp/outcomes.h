#pragma once

// Shared by the tests of all layers: the error that a function throws, and waits for what other threads do.

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

/// Whether a condition remains true for `duration`, which gives what would be wrong the time to happen.
template <typename Condition>
bool remains(Condition&& condition, std::chrono::milliseconds duration = std::chrono::milliseconds(50)) {
  const auto end = std::chrono::steady_clock::now() + duration;
  while (std::chrono::steady_clock::now() < end) {
    if (!condition()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return condition();
}

}  // namespace torchrpc::test
