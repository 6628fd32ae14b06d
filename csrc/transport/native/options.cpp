#include "transport/native/options.h"

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "base/error.h"

namespace torchrpc::native {

Duration spinDuration() {
  const char* text = std::getenv("TORCHRPC_SPIN_US");
  if (!text || !*text) return Options().spin_budget;
  const std::string_view digits = text;
  int64_t microseconds = 0;
  const auto [end, error] = std::from_chars(digits.begin(), digits.end(), microseconds);
  if (error != std::errc() || end != digits.end() || microseconds < 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "TORCHRPC_SPIN_US is '" + std::string(digits) + "': it is a number of microseconds, 0 for never");
  }
  return std::chrono::microseconds(microseconds);
}

}  // namespace torchrpc::native
