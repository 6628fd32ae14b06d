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

std::optional<Kind> kindOf(std::string_view wanted) {
#define X(enumerator, number, role, name) \
  if (wanted == name) return Kind::enumerator;
  TORCHRPC_KINDS(X)
#undef X
  return std::nullopt;
}

}  // namespace torchrpc
