#pragma once

// The kinds of message, one row each. A row contains all properties of a kind. Other code reads them by the functions
// below. The numbers are part of the wire protocol: a number is never used again for another kind.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace torchrpc {

/// Whether a message is answered.
enum class Role : uint8_t {
  kRequest,  ///< The receiver answers with one kReply or kError, which has the same call id.
  kReply,    ///< The message answers a request.
  kOneWay,   ///< The message is not answered.
};

/// How often a request is sent.
enum class Delivery : uint8_t {
  kOnce,           ///< If the message or its reply is lost, the request fails.
  kUntilAnswered,  ///< The request is idempotent; the sender repeats it (`Messenger::requestReliably`).
};

/// The workers that may send a message, if workers have identities.
enum class Sender : uint8_t {
  kAnyone,   ///< members of the group and clients
  kMembers,  ///< members only: the message is part of the group's own work
};

/// The operation of the program to which a message belongs. Its requests and replies carry values of users.
enum class Operation : uint8_t {
  kNone,    ///< The message belongs to a protocol between nodes.
  kCall,    ///< rpc_sync and rpc_async: runs a callable and sends its result back.
  kRemote,  ///< remote: runs a callable and keeps its result for an RRef.
  kFetch,   ///< to_here: sends the value of an RRef.
};

/// The callable that a call runs.
enum class CallableType : uint8_t { kNone, kOperator, kCpp, kPython, kScript };

// X(enumerator, number, role, delivery, sender, operation, callable, name). Debug output and fault injection use
// `name`. Calls of torch operators and of script functions have the same name, as in torch.
#define TORCHRPC_KINDS(X)                                                                                   \
  X(kHello, 1, kOneWay, kOnce, kAnyone, kNone, kNone, "HELLO")                                              \
  X(kReply, 2, kReply, kOnce, kAnyone, kNone, kNone, "REPLY")                                               \
  X(kError, 3, kReply, kOnce, kAnyone, kNone, kNone, "ERROR")                                               \
  X(kPing, 4, kOneWay, kOnce, kAnyone, kNone, kNone, "PING")                                                \
  X(kPong, 5, kOneWay, kOnce, kAnyone, kNone, kNone, "PONG")                                                \
  X(kStarted, 6, kOneWay, kOnce, kAnyone, kNone, kNone, "STARTED")                                          \
  X(kGoodbye, 7, kOneWay, kOnce, kAnyone, kNone, kNone, "GOODBYE")                                          \
  X(kCancel, 8, kOneWay, kOnce, kAnyone, kNone, kNone, "CANCEL")                                            \
  X(kBuiltinCall, 16, kRequest, kOnce, kAnyone, kCall, kOperator, "SCRIPT_CALL")                            \
  X(kCppCall, 17, kRequest, kOnce, kAnyone, kCall, kCpp, "CPP_CALL")                                        \
  X(kPythonCall, 18, kRequest, kOnce, kAnyone, kCall, kPython, "PYTHON_CALL")                               \
  X(kScriptCall, 19, kRequest, kOnce, kAnyone, kCall, kScript, "SCRIPT_CALL")                               \
  X(kBuiltinRemote, 32, kRequest, kOnce, kAnyone, kRemote, kOperator, "SCRIPT_REMOTE_CALL")                 \
  X(kCppRemote, 33, kRequest, kOnce, kAnyone, kRemote, kCpp, "CPP_REMOTE_CALL")                             \
  X(kPythonRemote, 34, kRequest, kOnce, kAnyone, kRemote, kPython, "PYTHON_REMOTE_CALL")                    \
  X(kScriptRemote, 35, kRequest, kOnce, kAnyone, kRemote, kScript, "SCRIPT_REMOTE_CALL")                    \
  X(kRRefFetch, 48, kRequest, kOnce, kAnyone, kFetch, kNone, "SCRIPT_RREF_FETCH_CALL")                      \
  X(kPythonRRefFetch, 49, kRequest, kOnce, kAnyone, kFetch, kPython, "PYTHON_RREF_FETCH_CALL")              \
  X(kRRefForkRequest, 50, kRequest, kUntilAnswered, kAnyone, kNone, kNone, "RREF_FORK_REQUEST")             \
  X(kRRefChildAccept, 51, kRequest, kUntilAnswered, kAnyone, kNone, kNone, "RREF_CHILD_ACCEPT")             \
  X(kRRefUserDelete, 52, kRequest, kUntilAnswered, kAnyone, kNone, kNone, "RREF_USER_DELETE")               \
  X(kMemberJoined, 53, kRequest, kOnce, kAnyone, kNone, kNone, "MEMBER_JOINED")                             \
  X(kNameFind, 54, kRequest, kOnce, kAnyone, kNone, kNone, "NAME_FIND")                                     \
  X(kAutogradMark, 64, kRequest, kOnce, kMembers, kNone, kNone, "BACKWARD_MARK_REQ")                        \
  X(kAutogradGradients, 65, kRequest, kOnce, kMembers, kNone, kNone, "BACKWARD_AUTOGRAD_REQ")               \
  X(kAutogradAbort, 66, kRequest, kUntilAnswered, kMembers, kNone, kNone, "BACKWARD_ABORT_REQ")             \
  X(kAutogradRelease, 67, kRequest, kUntilAnswered, kMembers, kNone, kNone, "CLEANUP_AUTOGRAD_CONTEXT_REQ") \
  X(kRRefBackward, 68, kRequest, kOnce, kMembers, kNone, kNone, "RREF_BACKWARD_REQ")                        \
  X(kAutogradHeld, 69, kRequest, kUntilAnswered, kMembers, kNone, kNone, "HELD_AUTOGRAD_CONTEXTS_REQ")      \
  X(kOptimCreate, 80, kRequest, kOnce, kMembers, kNone, kNone, "OPTIM_CREATE")                              \
  X(kOptimStep, 81, kRequest, kOnce, kMembers, kNone, kNone, "OPTIM_STEP")                                  \
  X(kOptimState, 82, kRequest, kOnce, kMembers, kNone, kNone, "OPTIM_STATE")                                \
  X(kOptimLoad, 83, kRequest, kOnce, kMembers, kNone, kNone, "OPTIM_LOAD")                                  \
  X(kNameHold, 88, kRequest, kOnce, kMembers, kNone, kNone, "NAME_HOLD")                                    \
  X(kNameDrop, 89, kRequest, kOnce, kMembers, kNone, kNone, "NAME_DROP")                                    \
  X(kInspect, 96, kRequest, kOnce, kMembers, kNone, kNone, "INSPECT")                                       \
  X(kMemoryProbe, 104, kRequest, kOnce, kMembers, kNone, kNone, "MEMORY_PROBE")                             \
  X(kMemoryReturn, 105, kRequest, kUntilAnswered, kMembers, kNone, kNone, "MEMORY_RETURN")                  \
  X(kMemoryReclaim, 106, kRequest, kUntilAnswered, kMembers, kNone, kNone, "MEMORY_RECLAIM")                \
  X(kMemoryRead, 107, kRequest, kOnce, kMembers, kNone, kNone, "MEMORY_READ")

enum class Kind : uint16_t {
#define X(enumerator, number, role, delivery, sender, operation, callable, name) enumerator = number,
  TORCHRPC_KINDS(X)
#undef X
};

/// One row of the table.
struct KindTraits {
  Kind kind;
  Role role;
  Delivery delivery;
  Sender sender;
  Operation operation;
  CallableType callable;
  std::string_view name;
};

namespace kinds_detail {

inline constexpr KindTraits kRows[] = {
#define X(enumerator, number, role, delivery, sender, operation, callable, name)                 \
  {Kind::enumerator,       Role::role, Delivery::delivery, Sender::sender, Operation::operation, \
   CallableType::callable, name},
    TORCHRPC_KINDS(X)
#undef X
};

inline constexpr KindTraits kUnknown{Kind{},           Role::kOneWay,       Delivery::kOnce, Sender::kAnyone,
                                     Operation::kNone, CallableType::kNone, "UNKNOWN"};

/// The row of each number.
inline constexpr auto kIndex = [] {
  std::array<const KindTraits*, 128> index{};
  for (auto& row : index) row = &kUnknown;
  for (const auto& row : kRows) index[static_cast<size_t>(row.kind)] = &row;
  return index;
}();

}  // namespace kinds_detail

/// Returns the row of a kind. A peer can send any number: for one that is no kind, returns the row named "UNKNOWN".
constexpr const KindTraits& traitsOf(Kind kind) {
  const auto number = static_cast<size_t>(kind);
  return number < kinds_detail::kIndex.size() ? *kinds_detail::kIndex[number] : kinds_detail::kUnknown;
}

/// Returns the role of a kind; nullopt for a number that is no kind.
constexpr std::optional<Role> roleOf(Kind kind) {
  const auto& traits = traitsOf(kind);
  return &traits == &kinds_detail::kUnknown ? std::nullopt : std::optional(traits.role);
}
/// Whether a message of that kind runs a callable.
constexpr bool isCall(Kind kind) {
  const auto operation = traitsOf(kind).operation;
  return operation == Operation::kCall || operation == Operation::kRemote;
}
/// Whether a message of that kind, or its reply, carries values of users: true for all operations.
constexpr bool carriesValues(Kind kind) { return traitsOf(kind).operation != Operation::kNone; }
/// Whether a request of that kind begins work that the program has asked for, on the worker that receives it.
constexpr bool beginsWork(Kind kind) {
  return carriesValues(kind) || kind == Kind::kNameFind || kind == Kind::kRRefBackward ||
      (kind >= Kind::kOptimCreate && kind <= Kind::kOptimLoad);
}
/// Whether a request of that kind is idempotent and the sender repeats it until it is answered.
constexpr bool isReliable(Kind kind) { return traitsOf(kind).delivery == Delivery::kUntilAnswered; }
/// Whether a worker counts a request of that kind as served: against quotas, in the audit log, and among the requests
/// that it answers before it ends. It does not count requests that are sent until answered, such as those that release
/// resources, nor requests that transfer tensors of another message.
constexpr bool isCounted(Kind kind) {
  return !isReliable(kind) && kind != Kind::kMemoryProbe && kind != Kind::kMemoryRead;
}
/// Whether only members of the group may send messages of that kind.
constexpr bool isForMembers(Kind kind) { return traitsOf(kind).sender == Sender::kMembers; }
/// Returns the name of a kind.
constexpr std::string_view name(Kind kind) { return traitsOf(kind).name; }
/// Returns the kinds with that name: none, one, or several.
std::vector<Kind> kindsOf(std::string_view name);

/// Returns the kind of message that performs `operation` with a callable of that type. For Operation::kFetch `callable`
/// is the type that made the value; one kind fetches all values except those of Python functions.
constexpr Kind kindOf(Operation operation, CallableType callable) {
  if (operation == Operation::kFetch && callable != CallableType::kPython) callable = CallableType::kNone;
  for (const auto& row : kinds_detail::kRows) {
    if (row.operation == operation && row.callable == callable) return row.kind;
  }
  return Kind{};
}

}  // namespace torchrpc
