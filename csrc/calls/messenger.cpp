#include "calls/messenger.h"

namespace torchrpc {

Error Responder::dropped() {
  return {ErrorCode::kShutdown, "the request was dropped without an answer, as happens at shutdown"};
}

}  // namespace torchrpc
