#include "node/allow_list.h"

namespace torchrpc {

AllowList::AllowList(const std::vector<std::string>& entries) {
  for (const auto& entry : entries) {
    if (entry.empty() || entry == "*") {
      throw Error(
          ErrorCode::kInvalidArgument,
          "allowed_functions has '" + entry + "', which would allow " + (entry.empty() ? "nothing" : "everything") +
              ": give names such as 'package.module.function', 'package.*' or 'aten::add'");
    }
    if (entry.ends_with('*')) {
      prefixes_.push_back(entry.substr(0, entry.size() - 1));
    } else {
      names_.insert(entry);
    }
  }
}

std::string AllowList::entryFor(const std::string& name) const {
  if (names_.contains(name)) return name;
  for (const auto& prefix : prefixes_) {
    if (name.starts_with(prefix)) return prefix + "*";
  }
  return {};
}

void AllowList::check(const std::shared_ptr<const AllowList>& list, const std::string& name) {
  if (!list || !list->entryFor(name).empty()) return;
  throw Error(
      ErrorCode::kNotAllowed,
      "this worker does not let others run " + name + ": its allowed_functions do not have it. Start the worker with " +
          name + " among them if they may");
}

}  // namespace torchrpc
