#include "base/utc.h"

#include <array>
#include <ctime>

namespace torchrpc {

std::string utcText(std::chrono::sys_seconds time, const char* format) {
  const auto seconds = static_cast<std::time_t>(time.time_since_epoch().count());
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  std::array<char, 64> text{};
  return {text.data(), std::strftime(text.data(), text.size(), format, &parts)};
}

}  // namespace torchrpc
