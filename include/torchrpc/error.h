#pragma once

// What can go wrong: thrown to callers, kept in replies, sent between workers as a number and a text.
// The kind of an error is never read out of its text.

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

#if defined(_GLIBCXX_USE_CXX11_ABI) && !_GLIBCXX_USE_CXX11_ABI
#error "torchrpc and LibTorch are built with the C++11 ABI: compile without -D_GLIBCXX_USE_CXX11_ABI=0"
#endif

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
  kFrameTooLarge = 8,    ///< a message larger than the limits allow
  kProtocol = 9,         ///< a peer sent what the protocol does not allow
  kShutdown = 10,        ///< the local node is going down
  kRRefCreation = 11,    ///< the owner may never have created the value
  kRRefDeleted = 12,     ///< a reference used after its deletion
  kRendezvous = 13,      ///< the group could not be formed
  kBackward = 14,        ///< a node or hook of a backward pass threw; `detail` as with kUserException
};

/// The name of a code, for logs and debug output, e.g. "timeout". Any thread.
std::string_view name(ErrorCode code);

/// An error with its kind, a text for people and, where one is concerned, the name of the worker. A value: copies are
/// independent of each other and of any node.
class Error : public std::exception {
 public:
  /// `worker` and `detail` as worker() and detail() give them.
  Error(ErrorCode code, std::string text, std::string worker = {}, std::string detail = {})
      : code_(code), text_(std::move(text)), worker_(std::move(worker)), detail_(std::move(detail)) {}

  /// What kind of error it is: what programs decide by.
  ErrorCode code() const noexcept { return code_; }
  /// What happened and what to do about it, for people.
  const std::string& text() const noexcept { return text_; }
  /// The worker concerned, empty if none.
  const std::string& worker() const noexcept { return worker_; }
  /// Opaque to the core: a binding's own form of the exception (Python: a pickle of it).
  const std::string& detail() const noexcept { return detail_; }
  /// text(), for those who catch std::exception.
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  ErrorCode code_;
  std::string text_;
  std::string worker_;
  std::string detail_;
};

}  // namespace torchrpc
