#include "node/allow_list.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace torchrpc {

namespace {
constexpr std::array<std::string_view, 5> kOfTorch = {"aten::", "prim::", "prims::", "quantized::", "__torch__.torch."};

/// Operators of torch that read or write files, or make a tensor of any part of a storage: no prefix allows them.
constexpr std::array<std::string_view, 3> kOnlyByName = {"aten::from_file", "aten::save", "aten::set_"};
}  // namespace

AllowList::AllowList(const std::vector<std::string>& entries, std::string workers) : workers_(std::move(workers)) {
  for (const auto& entry : entries) {
    if (entry.empty() || entry == "*") {
      throw Error(
          ErrorCode::kInvalidArgument,
          "allowed_functions has '" + entry + "', which would allow " + (entry.empty() ? "nothing" : "everything") +
              ": give names such as 'package.module.function', 'package.*' or 'aten::add'");
    }
    // "cpp_function(search.*)" is written like the names that it allows.
    const auto star = entry.find('*');
    if (star != std::string::npos) {
      if (const auto rest = entry.substr(star); rest != "*" && rest != "*)") {
        throw Error(
            ErrorCode::kInvalidArgument,
            "allowed_functions has '" + entry +
                "', but '*' stands only at the end of a prefix: write 'package.*', "
                "'aten::*' or 'cpp_function(package.*)'");
      }
      prefixes_.push_back(entry.substr(0, star));
    } else {
      names_.insert(entry);
    }
  }
}

std::string AllowList::entryFor(const std::string& name) const {
  if (names_.contains(name)) return name;
  if (std::ranges::find(kOnlyByName, name) != kOnlyByName.end()) return {};
  // Such names are private to a module or class: no prefix allows them.
  if (const auto last = name.find_last_of(".:("); name.compare(last + 1, 1, "_") == 0) return {};
  for (const auto& prefix : prefixes_) {
    if (name.starts_with(prefix)) return prefix + "*";
  }
  return {};
}

void AllowList::check(const std::shared_ptr<const AllowList>& list, const std::string& name) {
  if (!list || !list->entryFor(name).empty()) return;
  const bool is_for_all = list->workers() == kAllNames;
  // Of torch's own functions, some read files or memory without checks.
  const auto is_of_torch = [&](std::string_view prefix) { return name.starts_with(prefix); };
  const bool is_of_program = std::ranges::none_of(kOfTorch, is_of_torch);
  throw Error(
      ErrorCode::kNotAllowed,
      std::string("this worker does not let ") + (is_for_all ? "others" : "this caller") + " run " + name +
          ": its allowed_functions do not have it" +
          (is_for_all ? "" : " for workers named '" + list->workers() + "'") +
          (is_of_program ? ". Start the worker with " + name + " among them if they may"
                         : ". If they may, let a function of your own do what callers need, and list that function"));
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
