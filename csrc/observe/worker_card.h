#pragma once

// What a tool on the same machine needs to inspect a worker process of the same user: a sealed file in the process'
// memory, which /proc/PID/fd shows to that user. It leaves nothing behind when the process dies.

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
  /// Lines "name value". Values have no line breaks. A system without such files has no card.
  explicit WorkerCard(const std::vector<std::pair<std::string, std::string>>& fields);
  /// Bytes as a value.
  static std::string hex(const std::string& bytes);

 private:
  native::Descriptor file_;
};

}  // namespace torchrpc
