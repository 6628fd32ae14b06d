#include "agent/messenger.h"

namespace torchrpc {

Responder::Once::~Once() {
  if (sink) {
    sink(Error(ErrorCode::kUnknown, "the callee dropped the request without an answer"));
  }
}

void Responder::complete(Result<Message> result) const {
  if (!sink_) return;
  auto sink = std::exchange(sink_->sink, nullptr);
  if (sink) sink(std::move(result));
}

}  // namespace torchrpc
