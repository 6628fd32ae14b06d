#include "node/allow_list.h"

namespace torchrpc {

AllowList::AllowList(const std::vector<std::string>& entries, std::string workers) : workers_(std::move(workers)) {
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
  const bool is_for_all = list->workers() == kAllNames;
  throw Error(
      ErrorCode::kNotAllowed,
      std::string("this worker does not let ") + (is_for_all ? "others" : "this caller") + " run " + name +
          ": its allowed_functions do not have it" +
          (is_for_all ? "" : " for workers named '" + list->workers() + "'") + ". Start the worker with " + name +
          " among them if they may");
}

AllowLists::AllowLists(const std::vector<Allowance>& allowances) {
  for (const auto& [workers, functions] : allowances) {
    entries_.push_back({workers, functions ? std::make_shared<const AllowList>(*functions, workers) : nullptr});
  }
  if (!allowances.empty()) others_ = std::make_shared<const AllowList>(std::vector<std::string>(), "");
}

AllowListPtr AllowLists::find(const std::string& worker) const {
  for (const auto& [workers, list] : entries_) {
    if (matchesPattern(worker, workers)) return list;
  }
  return others_;
}

}  // namespace torchrpc
