#pragma once

// Asks workers what they do, without being one: see Inspector. Threads: any.

#include <ATen/core/ivalue.h>

#include <memory>
#include <string>

#include "base/timer.h"
#include "observe/inspector.h"
#include "transport/transport.h"

namespace torchrpc {

class Observer {
 public:
  explicit Observer(std::unique_ptr<Transport> transport) : transport_(std::move(transport)) {}

  /// The report of the worker of that name at `address`, a dict. Blocks for at most `timeout`. Throws Error: kTimeout,
  /// kWorkerLost, kNotAllowed, or what the worker answers.
  c10::IValue ask(const std::string& address, const std::string& name, const InspectRequest& request, Duration timeout);
  /// Ends the questions under way.
  void close() { transport_->close(); }

 private:
  const std::unique_ptr<Transport> transport_;
};

/// The report in a reply to INSPECT. Throws Error.
c10::IValue reportIn(Result<Message> reply);

}  // namespace torchrpc
