#include "calls/unanswered_calls.h"

namespace torchrpc {

void UnansweredCalls::add(const ServedCall& call, const Responder& responder) {
  if (responder.isAnswered()) return;
  MutexLock lock(mutex_);
  if (entries_.size() >= prune_at_) prune();
  entries_.push_back({call, Responder::Observer(responder)});
}

// An answer does not remove its entry, because that would be one more step of each answer. Instead, answered entries
// are removed when the list has doubled.
void UnansweredCalls::prune() {
  constexpr size_t kFew = 64;
  std::erase_if(entries_, [](const auto& entry) { return entry.answer.isAnswered(); });
  prune_at_ = 2 * entries_.size() + kFew;
}

std::vector<ServedCall> UnansweredCalls::all() const {
  std::vector<ServedCall> out;
  MutexLock lock(mutex_);
  for (const auto& entry : entries_) {
    if (!entry.answer.isAnswered()) out.push_back(entry.call);
  }
  return out;
}

}  // namespace torchrpc
