#include "wire/kinds.h"

namespace torchrpc {

std::optional<Role> roleOf(Kind kind) {
  switch (kind) {
#define X(enumerator, number, role, name) \
  case Kind::enumerator: return Role::role;
    TORCHRPC_KINDS(X)
#undef X
  }
  return std::nullopt;
}

std::string_view name(Kind kind) {
  switch (kind) {
#define X(enumerator, number, role, name) \
  case Kind::enumerator: return name;
    TORCHRPC_KINDS(X)
#undef X
  }
  return "UNKNOWN";
}

bool isCall(Kind kind) {
  switch (kind) {
    case Kind::kBuiltinCall:
    case Kind::kCppCall:
    case Kind::kPythonCall:
    case Kind::kScriptCall:
    case Kind::kBuiltinRemote:
    case Kind::kCppRemote:
    case Kind::kPythonRemote:
    case Kind::kScriptRemote: return true;
    default: return false;
  }
}

std::vector<Kind> kindsOf(std::string_view wanted) {
  std::vector<Kind> kinds;
#define X(enumerator, number, role, name) \
  if (wanted == name) kinds.push_back(Kind::enumerator);
  TORCHRPC_KINDS(X)
#undef X
  return kinds;
}

}  // namespace torchrpc
