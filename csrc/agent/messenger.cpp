#include "agent/messenger.h"

namespace torchrpc {

Responder::Once::~Once() {
  if (sink) {
    sink(Error(ErrorCode::kShutdown, "the request was dropped without an answer, as happens at shutdown"));
  }
}

void Responder::complete(Result<Message> result) const {
  if (!sink_) return;
  auto sink = std::exchange(sink_->sink, nullptr);
  if (sink) sink(std::move(result));
}

}  // namespace torchrpc
