#pragma once

// The names of the functions that callers may run on a node, as names or prefixes of names: one list for all callers,
// or several, each for the callers whose names match a pattern. Threads: any; constant after construction.
//
// A name is "package.module.function" or "package.module.Class" for Python, "aten::add" for a torch operator,
// "__torch__.module.function" for a script function, "cpp_function(name)" for a C++ function. The prefixes "package.*"
// and "aten::*" stand for all names that begin with "package." and "aten::", except those whose last part begins with
// an underscore, such as "package.Class.__init__" or "aten::_unsafe_view".

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/name_pattern.h"

namespace torchrpc {

class AllowList {
 public:
  /// `workers`: the pattern of the names of the callers to which the list applies; see Allowance.
  explicit AllowList(const std::vector<std::string>& entries, std::string workers = kAllNames);

  /// Returns the entry that allows `name`: an exact entry before a prefix. Empty if no entry allows it.
  std::string entryFor(const std::string& name) const;
  /// Throws Error(kNotAllowed), with the name and a remedy, unless `list` is null or allows `name`.
  static void check(const std::shared_ptr<const AllowList>& list, const std::string& name);
  /// The pattern of callers. Empty: the list is for callers that no pattern matches.
  const std::string& workers() const { return workers_; }

 private:
  std::set<std::string> names_;
  std::vector<std::string> prefixes_;
  const std::string workers_;
};

using AllowListPtr = std::shared_ptr<const AllowList>;  ///< null: everything is allowed

/// The functions that workers whose names match a pattern may run: see matchesPattern().
struct Allowance {
  std::string workers;
  std::optional<std::vector<std::string>> functions;  ///< entries of an AllowList; empty optional: everything
};

/// The allow-list of each caller.
class AllowLists {
 public:
  /// The first pattern that matches a caller's name decides. A caller that none matches may run nothing. Without
  /// allowances, all callers may run everything.
  explicit AllowLists(const std::vector<Allowance>& allowances);

  AllowListPtr of(const std::string& worker) const { return entries_.empty() ? nullptr : find(worker); }
  /// The list for a worker of unknown name: the list for all workers if that is the only one, else an empty list.
  AllowListPtr ofAnyone() const { return isForAll() ? entries_.front().list : others_; }

 private:
  AllowListPtr find(const std::string& worker) const;
  bool isForAll() const { return entries_.size() == 1 && entries_.front().workers == kAllNames; }

  struct Entry {
    std::string workers;
    AllowListPtr list;
  };
  std::vector<Entry> entries_;
  AllowListPtr others_;  ///< the list of workers that no entry matches
};

}  // namespace torchrpc
