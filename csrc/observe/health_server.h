#pragma once

// Answers probes by HTTP: GET of /healthz (or /) is 200 while the worker serves calls, else 503 with the reason. For
// Kubernetes, load balancers and curl; it understands no more of HTTP than that, and nothing of the request but its
// first line. Anybody who reaches the port may ask. Few connections are open at a time, each for a second at most.
// Threads: one of its own, which runs the check; the methods belong to the thread that makes it.

#include <functional>
#include <string>
#include <thread>

#include "transport/native/socket/socket.h"

namespace torchrpc {

class HealthServer {
 public:
  /// Why the worker serves no calls; empty if it does. What it throws is a reason, too.
  using Check = std::function<std::string()>;

  /// `address`: "8080" for all addresses of this host, or "127.0.0.1:8080"; port 0 lets the system choose. Throws
  /// Error(kInvalidArgument) for another text, Error(kRendezvous) if it cannot listen there.
  HealthServer(const std::string& address, Check check);
  /// Ends the thread.
  ~HealthServer();
  HealthServer(const HealthServer&) = delete;
  HealthServer& operator=(const HealthServer&) = delete;

  /// Where it listens, with the port.
  const std::string& address() const { return address_; }

 private:
  struct Connection;
  void run() const;
  /// Reads what has come, and answers if that is a request.
  void serve(Connection& connection) const;
  std::string answerTo(std::string_view request) const;

  const Check check_;
  native::Descriptor listener_;
  std::string address_;
  native::Descriptor stop_reader_, stop_writer_;  ///< a pipe, whose end ends the thread
  std::thread thread_;
};

}  // namespace torchrpc
