#include "calls/send_faults.h"

#include <unordered_map>

#include "base/error.h"
#include "base/sync/mutex.h"
#include "wire/kinds.h"

namespace torchrpc {

namespace {

struct Faults {
  // Constant after makeSendFaults():
  int times = 0;
  std::map<Kind, SendFault> by_kind;

  Mutex mutex;
  std::unordered_map<std::string, int> failed TORCHRPC_GUARDED_BY(mutex);  ///< the number of failures, by contents

  SendFault next(const Message& request) {
    const auto it = by_kind.find(request.kind);
    if (it == by_kind.end()) return {};
    auto fault = it->second;
    if (fault.fail) {
      MutexLock lock(mutex);
      auto& count = failed[contents(request)];
      fault.fail = count < times;
      if (fault.fail) ++count;
    }
    return fault;
  }

  static std::string contents(const Message& message) {
    std::string out(name(message.kind));
    for (const auto& header : message.headers) out += '\n' + header.bytes;
    return out + '\n' + message.payload;
  }

  template <typename F>
  void forEachKind(const std::string& name, F&& change) {
    const auto kinds = kindsOf(name);
    if (kinds.empty()) throw Error(ErrorCode::kInvalidArgument, "there is no kind of message named " + name);
    for (auto kind : kinds) change(by_kind[kind]);
  }
};

}  // namespace

SendFaultPolicy makeSendFaults(
    const std::vector<std::string>& fail, int times, const std::map<std::string, double>& delay_seconds) {
  if (times < 0) throw Error(ErrorCode::kInvalidArgument, "num_fail_sends must not be negative");
  auto faults = std::make_shared<Faults>();
  faults->times = times;
  for (const auto& name : fail) {
    faults->forEachKind(name, [](SendFault& fault) { fault.fail = true; });
  }
  for (const auto& [name, seconds] : delay_seconds) {
    if (!(seconds >= 0)) throw Error(ErrorCode::kInvalidArgument, "the delay of " + name + " must not be negative");
    faults->forEachKind(name, [delay = durationFromSeconds(seconds)](SendFault& fault) { fault.delay = delay; });
  }
  return [faults](const Message& request) { return faults->next(request); };
}

}  // namespace torchrpc
