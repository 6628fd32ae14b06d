#include "base/name_pattern.h"

#include <fnmatch.h>

namespace torchrpc {

bool matchesPattern(const std::string& name, const std::string& pattern) {
  return pattern == kAllNames || ::fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
}

}  // namespace torchrpc
