#pragma once

// The data that a tool on the same machine needs to inspect a worker process of the same user. It is a sealed file in
// the memory of the process (memfd), which that user can read in /proc/PID/fd. Nothing is left behind when the process
// dies.

#include <string>
#include <utility>
#include <vector>

#include "transport/native/socket/socket.h"

namespace torchrpc {

class WorkerCard {
 public:
  /// The name of the file.
  static constexpr auto kFileName = "torchrpc-worker";

  WorkerCard() = default;
  /// Writes a line "name value" for each field. Values must not have line breaks. On a system without sealed files in
  /// memory there is no card.
  explicit WorkerCard(const std::vector<std::pair<std::string, std::string>>& fields);
  /// Returns bytes in hexadecimal, as the value of a field.
  static std::string hex(const std::string& bytes);

 private:
  native::Descriptor file_;
};

}  // namespace torchrpc
