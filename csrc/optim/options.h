#pragma once

// The options of an optimizer, with the names that they have in torch.optim.

#include <ATen/core/ivalue.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

namespace torchrpc {

/// Option -> number, bool, pair of numbers or None. Missing options have torch.optim's defaults.
using Options = std::map<std::string, c10::IValue>;

/// Reads options with their types. Throws Error(kInvalidArgument) for an option of another type, or with a name that
/// the optimizer does not have.
class OptionReader {
 public:
  OptionReader(std::string optimizer, const Options& options) : optimizer_(std::move(optimizer)), options_(options) {}

  const std::string& optimizer() const { return optimizer_; }
  double number(const char* name, double fallback);
  bool flag(const char* name, bool fallback);
  std::pair<double, double> pair(const char* name, std::pair<double, double> fallback);
  /// True, False or None.
  std::optional<bool> choice(const char* name);
  /// Throws if an option has not been read. Must be called last.
  void expectNoOther() const;

 private:
  const c10::IValue* find(const char* name);
  [[noreturn]] void reject(const char* name, const char* expected) const;

  const std::string optimizer_;
  const Options& options_;
  std::set<std::string> known_;
};

}  // namespace torchrpc
