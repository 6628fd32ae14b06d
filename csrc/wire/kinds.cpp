#include "wire/kinds.h"

namespace torchrpc {

std::vector<Kind> kindsOf(std::string_view name) {
  std::vector<Kind> kinds;
  for (const auto& row : kinds_detail::kRows) {
    if (row.name == name) kinds.push_back(row.kind);
  }
  return kinds;
}

}  // namespace torchrpc
