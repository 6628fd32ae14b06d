#pragma once

// What can go wrong, as a value: kept in replies, thrown to C++ callers, sent over the wire as a number and a text.
// The kind of an error is never read out of its text.

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

namespace torchrpc {

/// The kinds of error. The numbers are part of the wire protocol: never reuse one.
enum class ErrorCode : uint16_t {
  kUnknown = 0,
  kInvalidArgument = 1,  ///< the local caller's mistake; nothing was sent
  kTimeout = 2,          ///< the deadline passed before the reply came
  kWorkerLost = 3,       ///< the peer died, or the way to it broke
  kUnknownWorker = 4,    ///< no worker of that name or id in the group
  kUserException = 5,    ///< the called function raised; `detail` says what, in its own language
  kNoSuchFunction = 6,   ///< the callee cannot find what it was asked to run
  kSerialization = 7,    ///< a value that cannot be sent, or bytes that are not one
  kFrameTooLarge = 8,    ///< larger than Limits allows
  kProtocol = 9,         ///< a peer sent what the protocol does not allow
  kShutdown = 10,        ///< the local node is going down
  kRRefCreation = 11,    ///< the owner may never have created the value
  kRRefDeleted = 12,     ///< a reference used after its deletion
  kRendezvous = 13,      ///< the group could not be formed
  kBackward = 14,        ///< a node or hook of a backward pass threw; `detail` as with kUserException
};

/// The name of a code, for logs and debug output, e.g. "timeout".
std::string_view name(ErrorCode code);

/// An error with its kind, a text for people and, where one is concerned, the name of the worker.
class Error : public std::exception {
 public:
  Error(ErrorCode code, std::string text, std::string worker = {}, std::string detail = {})
      : code_(code), text_(std::move(text)), worker_(std::move(worker)), detail_(std::move(detail)) {}

  ErrorCode code() const noexcept { return code_; }
  const std::string& text() const noexcept { return text_; }
  /// The worker concerned, empty if none.
  const std::string& worker() const noexcept { return worker_; }
  /// Opaque to the core: a binding's own form of the exception (Python: a pickle of it).
  const std::string& detail() const noexcept { return detail_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  ErrorCode code_;
  std::string text_;
  std::string worker_;
  std::string detail_;
};

}  // namespace torchrpc
