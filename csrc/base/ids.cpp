#include "base/ids.h"

#include <algorithm>
#include <cctype>

#include "base/error.h"

namespace torchrpc {

namespace {
constexpr size_t kMaxNameBytes = 127;

[[noreturn]] void throwForSelf(std::string text) { throw Error(ErrorCode::kInvalidArgument, std::move(text)); }
}  // namespace

std::string toString(const GloballyUniqueId& id) {
  return "GloballyUniqueId(created_on=" + std::to_string(id.created_on) + ", local_id=" + std::to_string(id.local_id) +
      ")";
}

std::ostream& operator<<(std::ostream& out, const GloballyUniqueId& id) { return out << toString(id); }

std::string toString(const WorkerInfo& worker) {
  return "WorkerInfo(id=" + std::to_string(worker.id) + ", name=" + worker.name + ")";
}

bool isName(std::string_view name) {
  return !name.empty() && name.size() <= kMaxNameBytes && std::ranges::all_of(name, [](unsigned char c) {
    return std::isalnum(c) || c == '_' || c == ':' || c == '-' || c == '.';
  });
}

void validateName(const std::string& name) {
  if (name.empty()) throwForSelf("Worker name must be non-empty: give the worker a name such as \"worker0\"");
  if (name.size() > kMaxNameBytes) {
    throwForSelf(
        "Worker name must be shorter than 128 characters, but \"" + name.substr(0, 32) + "…\" has " +
        std::to_string(name.size()));
  }
  if (!isName(name)) throwForSelf("Worker name must match ^[A-Za-z0-9-_:.]*$, but got \"" + name + "\"");
}

void validateSelf(const WorkerInfo& self, int32_t world_size) {
  const auto& name = self.name;
  validateName(name);
  if (self.id < 0) throwForSelf("rank must be 0 or more, but " + name + " got " + std::to_string(self.id));
  if (world_size < 0) throwForSelf("world_size must be positive, but " + name + " got " + std::to_string(world_size));
  if (world_size > kMaxWorldSize || self.id >= kMaxWorldSize) {
    throwForSelf(
        "a group has " + std::to_string(kMaxWorldSize) + " workers at most, but " + name + " got " +
        (world_size > kMaxWorldSize ? "world_size " + std::to_string(world_size) : "rank " + std::to_string(self.id)));
  }
  if (world_size > 0 && self.id >= world_size) {
    throwForSelf(
        "rank must be less than world_size, but " + name + " got rank " + std::to_string(self.id) + " in a group of " +
        std::to_string(world_size));
  }
}

}  // namespace torchrpc
