#pragma once

// Errors: thrown to callers, stored in replies, sent between workers as a code and a text.
// Programs decide by the code, never by the text.

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
  kInvalidArgument = 1,       ///< a mistake in the use of this library; nothing was sent
  kTimeout = 2,               ///< the deadline passed before the reply arrived
  kWorkerLost = 3,            ///< the peer died, fell silent, or its connection broke
  kUnknownWorker = 4,         ///< no worker of that name or id in the group
  kUserException = 5,         ///< the called function threw; detail() holds the exception in its own language
  kNoSuchFunction = 6,        ///< the callee cannot find the function
  kSerialization = 7,         ///< a value cannot be sent, or received bytes do not encode a value
  kFrameTooLarge = 8,         ///< a message exceeds the size limits
  kProtocol = 9,              ///< a peer violated the protocol
  kShutdown = 10,             ///< the local node is shutting down or has shut down
  kRRefCreation = 11,         ///< the owner may never have created the value
  kRRefDeleted = 12,          ///< a reference was used after its deletion
  kRendezvous = 13,           ///< the group could not be formed
  kBackward = 14,             ///< a node or hook of a backward pass threw; detail() as for kUserException
  kNotAllowed = 15,           ///< the callee does not let others run the function
  kRRefCreationTimeout = 16,  ///< as kRRefCreation, because the deadline of remote() passed
  kQuotaExceeded = 17,        ///< a quota of the callee is used up, for this caller or for all callers
  kCancelled = 18,            ///< the caller has cancelled the call
  kArgumentMismatch = 19,     ///< the called function does not take the arguments: their number or their types
  kResultMismatch = 20,       ///< the result is no value of the type that the caller asks for
  kNameNotFound = 21,         ///< no object of the group has the name
};

/// The name of a code, for logs and debug output, e.g. "timeout". Any thread.
std::string_view name(ErrorCode code);

/// The place where an error happened, a hint at its cause. The numbers are part of the wire protocol.
enum class ErrorOrigin : uint8_t {
  kHere = 1,  ///< on this worker, before anything was sent: an argument, an option, a worker that is not in the group
  kOnTheWay = 2,  ///< between the workers: a loss, a time-out, a cancellation, a shutdown
  kRequest = 3,   ///< on the callee, which did not run the function: unknown, forbidden, or wrong arguments
  kFunction = 4,  ///< in the called function, or in a call that it made
  kResult = 5,    ///< with the function's result: it cannot be sent, or is not what the caller expects
};

/// "here", "on the way", "request", "function" or "result". Any thread.
std::string_view name(ErrorOrigin origin);
/// The default origin of errors with that code. Any thread.
ErrorOrigin usualOrigin(ErrorCode code);

/// An error: its code, a text for humans to read and the name of the worker concerned, if any. A value: copies are
/// independent of each other and of any node. Const methods may be called from any thread.
class Error : public std::exception {
 public:
  /// `worker` and `detail` are returned by worker() and detail().
  Error(ErrorCode code, std::string text, std::string worker = {}, std::string detail = {})
      : code_(code), text_(std::move(text)), worker_(std::move(worker)), detail_(std::move(detail)) {}

  /// The kind of error. Programs decide by it.
  ErrorCode code() const noexcept { return code_; }
  /// The place where the error happened. For example, it is kFunction for an Error(kWorkerLost) that the called
  /// function threw because one of its own calls failed.
  ErrorOrigin origin() const noexcept { return origin_; }
  /// The same error with another origin.
  Error withOrigin(ErrorOrigin origin) const {
    auto other = *this;
    other.origin_ = origin;
    return other;
  }
  /// What happened and what to do, for humans to read.
  const std::string& text() const noexcept { return text_; }
  /// The name of the worker concerned: that of the callee, or of this worker; empty if no worker is known.
  const std::string& worker() const noexcept { return worker_; }
  /// The exception in the form of its language (Python: a pickle of it); opaque to C++.
  const std::string& detail() const noexcept { return detail_; }
  /// The type of the exception that the called function threw, as "std::out_of_range" or, of a Python function,
  /// "builtins.KeyError"; empty for errors of this library.
  const std::string& exceptionType() const noexcept { return exception_type_; }
  /// Returns a copy of the error that has this exceptionType().
  Error withExceptionType(std::string type) const {
    auto other = *this;
    other.exception_type_ = std::move(type);
    return other;
  }
  /// As text().
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  ErrorCode code_;
  ErrorOrigin origin_ = usualOrigin(code_);
  std::string text_;
  std::string worker_;
  std::string detail_;
  std::string exception_type_{};
};

}  // namespace torchrpc
