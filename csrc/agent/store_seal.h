#pragma once

// What the workers of a group publish in their store is authenticated by the group's secret: whoever can write to the
// store, but does not know the secret, cannot change where a worker is reached. PROTOCOL.md specifies the bytes.
// Not thread-safe.

#include <string>
#include <string_view>

namespace torchrpc {

class StoreSeal {
 public:
  /// `secret` empty: values are stored as they are.
  explicit StoreSeal(std::string_view secret = {});

  /// From now on values are of a group with exactly these records: values of another group, or of this one with a
  /// record that has been replaced, are not valid in it.
  void bindTo(std::string_view records);

  /// `value` as it is stored under `key`.
  std::string seal(std::string_view key, std::string_view value) const;
  /// The value in what is `stored` under `key`. Throws Error(kRendezvous), with `what` the store has there and a
  /// remedy, if no member of the group has sealed it.
  std::string open(std::string_view key, std::string_view stored, const std::string& what) const;

 private:
  std::string tag(std::string_view key, std::string_view value) const;

  std::string key_;    ///< derived from the secret; empty: there is none
  std::string group_;  ///< see bindTo()
};

}  // namespace torchrpc
