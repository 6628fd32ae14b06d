#pragma once

// Authenticates, by the group's secret, the values that the workers of a group publish in their store: a process that
// can write to the store, but does not know the secret, cannot change the address of a worker. PROTOCOL.md specifies
// the bytes.
// Not thread-safe.

#include <string>
#include <string_view>

namespace torchrpc {

class StoreSeal {
 public:
  /// `secret` empty: values are stored as they are.
  explicit StoreSeal(std::string_view secret = {});

  /// Binds values, from now on, to a group with exactly these records: values of another group, or of this one with a
  /// record that has been replaced, are not valid in it.
  void bindTo(std::string_view records);

  /// Returns `value` in the form in which it is stored under `key`.
  std::string seal(std::string_view key, std::string_view value) const;
  /// Returns the value in the bytes that are `stored` under `key`. Throws Error(kRendezvous) if no member of the group
  /// has sealed it; the error names `what` and a remedy.
  std::string open(std::string_view key, std::string_view stored, const std::string& what) const;

 private:
  std::string tag(std::string_view key, std::string_view value) const;

  std::string key_;    ///< derived from the secret; empty: no secret
  std::string group_;  ///< see bindTo()
};

}  // namespace torchrpc
