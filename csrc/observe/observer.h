#pragma once

// Requests the reports of workers (see Inspector) without being a worker. Threads: any.

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

  /// Returns the report, a dict, of the worker `name` at `address`. Blocks for at most `timeout`. Throws Error:
  /// kTimeout, kWorkerLost, kNotAllowed, or the error that the worker returns.
  c10::IValue ask(const std::string& address, const std::string& name, const InspectRequest& request, Duration timeout);
  /// Closes the transport. Calls of ask() in progress fail.
  void close() { transport_->close(); }

 private:
  const std::unique_ptr<Transport> transport_;
};

/// Returns the report in a reply to INSPECT. Throws Error.
c10::IValue reportIn(Result<Message> reply);

}  // namespace torchrpc
