#pragma once

// The kinds of message, one row each. The numbers are part of the wire protocol: never reuse one.

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace torchrpc {

/// What a message asks of the one who gets it.
enum class Role : uint8_t {
  kRequest,  ///< is answered by one kReply or kError of the same call id
  kReply,    ///< answers a request
  kOneWay,   ///< is not answered
};

// X(enumerator, number, role, name): `name` is what debug output and fault injection call it; torch operators and
// script functions share theirs, as in upstream.
#define TORCHRPC_KINDS(X)                                           \
  X(kHello, 1, kOneWay, "HELLO")                                    \
  X(kReply, 2, kReply, "REPLY")                                     \
  X(kError, 3, kReply, "ERROR")                                     \
  X(kPing, 4, kOneWay, "PING")                                      \
  X(kPong, 5, kOneWay, "PONG")                                      \
  X(kBuiltinCall, 16, kRequest, "SCRIPT_CALL")                      \
  X(kCppCall, 17, kRequest, "CPP_CALL")                             \
  X(kPythonCall, 18, kRequest, "PYTHON_CALL")                       \
  X(kScriptCall, 19, kRequest, "SCRIPT_CALL")                       \
  X(kBuiltinRemote, 32, kRequest, "SCRIPT_REMOTE_CALL")             \
  X(kCppRemote, 33, kRequest, "CPP_REMOTE_CALL")                    \
  X(kPythonRemote, 34, kRequest, "PYTHON_REMOTE_CALL")              \
  X(kScriptRemote, 35, kRequest, "SCRIPT_REMOTE_CALL")              \
  X(kRRefFetch, 48, kRequest, "SCRIPT_RREF_FETCH_CALL")             \
  X(kPythonRRefFetch, 49, kRequest, "PYTHON_RREF_FETCH_CALL")       \
  X(kRRefForkRequest, 50, kRequest, "RREF_FORK_REQUEST")            \
  X(kRRefChildAccept, 51, kRequest, "RREF_CHILD_ACCEPT")            \
  X(kRRefUserDelete, 52, kRequest, "RREF_USER_DELETE")              \
  X(kAutogradMark, 64, kRequest, "BACKWARD_MARK_REQ")               \
  X(kAutogradGradients, 65, kRequest, "BACKWARD_AUTOGRAD_REQ")      \
  X(kAutogradAbort, 66, kRequest, "BACKWARD_ABORT_REQ")             \
  X(kAutogradRelease, 67, kRequest, "CLEANUP_AUTOGRAD_CONTEXT_REQ") \
  X(kRRefBackward, 68, kRequest, "RREF_BACKWARD_REQ")               \
  X(kAutogradHeld, 69, kRequest, "HELD_AUTOGRAD_CONTEXTS_REQ")      \
  X(kOptimCreate, 80, kRequest, "OPTIM_CREATE")                     \
  X(kOptimStep, 81, kRequest, "OPTIM_STEP")                         \
  X(kOptimState, 82, kRequest, "OPTIM_STATE")                       \
  X(kOptimLoad, 83, kRequest, "OPTIM_LOAD")

enum class Kind : uint16_t {
#define X(enumerator, number, role, name) enumerator = number,
  TORCHRPC_KINDS(X)
#undef X
};

/// The role of a kind; nothing for a number that is no kind (a peer can send any).
std::optional<Role> roleOf(Kind kind);
/// Whether it is what users know as a call: it runs a function, whose result is sent back or kept.
bool isCall(Kind kind);
/// The name of a kind, "UNKNOWN" for a number that is none.
std::string_view name(Kind kind);
/// The kinds of a name: several for those that users do not tell apart, none for a name that is none.
std::vector<Kind> kindsOf(std::string_view name);

}  // namespace torchrpc
