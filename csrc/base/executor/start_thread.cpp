#include "base/executor/start_thread.h"

#include <string>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace torchrpc {

std::thread startThread(const char* purpose, std::function<void()> main) {
  try {
    return std::thread(std::move(main));
  } catch (const std::system_error& error) {
    throw Error(
        ErrorCode::kUnknown,
        std::string("the thread ") + purpose + " cannot be started: " + error.what() +
            ". The limit of processes and threads may be reached: `ulimit -u`, or the pids limit of a container");
  }
}

}  // namespace torchrpc
