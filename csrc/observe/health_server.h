#pragma once

// Answers health probes over HTTP, for Kubernetes, load balancers and curl: GET /healthz (or /) returns 200 while the
// worker serves calls, otherwise 503 with the reason. It implements nothing else of HTTP, and parses only the first
// line of a request. There is no authentication: every client that can connect to the port gets an answer. At most 64
// connections are open at a time, each for at most a second, plus the time that the program's own check takes. A
// further one closes the oldest connection of the address that has most of them. Threads: its own thread runs the
// check. The methods are for the thread that creates the object.

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "transport/native/socket/socket.h"

namespace torchrpc {

class HealthServer {
 public:
  /// Returns why the worker serves no calls; an empty string if it does. An exception counts as such a reason.
  using Check = std::function<std::string()>;

  /// `address`: "8080" for all addresses of this host, or "127.0.0.1:8080" for one. Port 0 lets the system choose a
  /// port. Throws Error(kInvalidArgument) for any other text, and Error(kRendezvous) if it cannot listen there.
  HealthServer(const std::string& address, Check check);
  /// Stops and joins the thread.
  ~HealthServer();
  HealthServer(const HealthServer&) = delete;
  HealthServer& operator=(const HealthServer&) = delete;

  /// The address on which it listens, with the port.
  const std::string& address() const { return address_; }

 private:
  struct Connection;
  void run() const;
  /// Accepts connections, and serves those that have sent their request. Returns false if no descriptor is left.
  bool acceptSome(std::vector<Connection>& connections) const;
  /// Closes the oldest connection of the address that has most of them.
  static void dropOne(std::vector<Connection>& connections);
  /// Reads the bytes that have arrived. Answers when the request is complete or too long.
  void serve(Connection& connection) const;
  std::string answerTo(std::string_view request) const;

  const Check check_;
  native::Descriptor listener_;
  std::string address_;
  native::Descriptor stop_reader_, stop_writer_;  ///< a pipe; closing the writer stops the thread
  std::thread thread_;
};

}  // namespace torchrpc
