#include "rref/fork_protocol.h"

#include "rref/rref.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {

/// Appends ids and numbers, one after the other.
template <typename... Fields>
void append(std::string& bytes, const Fields&... fields) {
  bytes.reserve(bytes.size() + (sizeof(fields) + ...));  // with padding, so at least what is written
  Writer out(bytes);
  const auto write = [&out](const auto& field) {
    if constexpr (std::is_same_v<std::decay_t<decltype(field)>, GloballyUniqueId>) {
      out.putId(field);
    } else if constexpr (std::is_same_v<std::decay_t<decltype(field)>, PeerId>) {
      out.put(field.worker);
      out.put(field.incarnation);
    } else {
      out.put(field);
    }
  };
  (write(fields), ...);
}

template <typename... Fields>
std::string pack(const Fields&... fields) {
  std::string bytes;
  append(bytes, fields...);
  return bytes;
}

template <typename... Fields>
void unpack(Reader& in, Fields&... fields) {
  const auto read = [&in](auto& field) {
    if constexpr (std::is_same_v<std::decay_t<decltype(field)>, GloballyUniqueId>) {
      field = in.getId();
    } else if constexpr (std::is_same_v<std::decay_t<decltype(field)>, PeerId>) {
      field.worker = in.get<WorkerId>();
      field.incarnation = in.get<uint64_t>();
    } else {
      field = in.get<std::decay_t<decltype(field)>>();
    }
  };
  (read(fields), ...);
}

template <typename... Fields>
void unpackAll(std::string_view bytes, Fields&... fields) {
  Reader in(bytes);
  unpack(in, fields...);
  in.expectEnd();
}

}  // namespace

std::string encodeForks(const std::vector<RRefFork>& forks) {
  std::string bytes;
  for (const auto& f : forks) append(bytes, f.rref, f.fork, f.owner, f.parent, f.creation, f.delivery);
  return bytes;
}

std::vector<RRefFork> decodeForks(std::string_view bytes) {
  std::vector<RRefFork> forks;
  Reader in(bytes);
  while (in.remaining() > 0) {
    auto& f = forks.emplace_back();
    unpack(in, f.rref, f.fork, f.owner, f.parent, f.creation, f.delivery);
  }
  return forks;
}

std::vector<RRefFork> forksIn(const Message& message) {
  const auto* header = message.header(HeaderKind::kRRefForks);
  if (!header) return {};
  auto forks = decodeForks(*header);
  for (const auto& fork : forks) {
    const bool is_own =
        message.from == kNoWorker || (fork.parent.worker == message.from && fork.fork.created_on == message.from);
    // The fork's delivery number is counted in the stream of its parent's worker, which also receives the acceptance.
    if (!is_own) throw Error(ErrorCode::kProtocol, "a message with a fork of an RRef that another worker has made");
  }
  return forks;
}

std::string encode(const RemoteResult& result) { return pack(result.rref, result.fork, result.creation); }

RemoteResult decodeRemoteResult(std::string_view bytes) {
  RemoteResult result;
  unpackAll(bytes, result.rref, result.fork, result.creation);
  return result;
}

std::string encode(const ForkRequest& request) {
  return pack(request.rref, request.fork, request.creation, request.registration);
}

ForkRequest decodeForkRequest(std::string_view bytes) {
  ForkRequest request;
  unpackAll(bytes, request.rref, request.fork, request.creation, request.registration);
  return request;
}

std::string encodeChildAccept(const ForkId& fork) { return pack(fork); }

ForkId decodeChildAccept(std::string_view bytes) {
  ForkId fork;
  unpackAll(bytes, fork);
  return fork;
}

std::string encode(const std::vector<UserDelete>& deletions) {
  std::string bytes;
  for (const auto& each : deletions) append(bytes, each.rref, each.fork, each.registration);
  return bytes;
}

std::vector<UserDelete> decodeUserDeletes(std::string_view bytes) {
  std::vector<UserDelete> deletions;
  Reader in(bytes);
  do {
    if (deletions.size() == kMostDeletions) throw Error(ErrorCode::kProtocol, "too many deletions in a message");
    auto& each = deletions.emplace_back();
    unpack(in, each.rref, each.fork, each.registration);
  } while (in.remaining() > 0);
  return deletions;
}

namespace {

std::string nameOf(const GroupMember& worker) {
  return worker.self.name + " of the group at " + worker.group + (worker.has_left ? ", which has shut down" : "");
}

}  // namespace

Error foreignError(const RRef& rref, const GroupMember& self) {
  const auto& member = *rref.member();
  return Error(
      ErrorCode::kInvalidArgument,
      "RRef " + toString(rref.id()) + ", owned by " + rref.owner().name + ", belongs to " + nameOf(member) +
          ". It cannot be used by " + nameOf(self) +
          (member.group == self.group ? ", another node of this process" : "") +
          ". An RRef is valid only in the group, and for the worker, where it was made or received: make a new one "
          "there, or pass a copy of the value.",
      self.self.name);
}

Error deletedError(const UserRRef& rref, std::string_view attempt) {
  return Error(
      ErrorCode::kRRefDeleted,
      "User RRef with RRefId=" + toString(rref.id()) + " and ForkId=" + toString(rref.forkId()) +
          " has been deleted. Cannot call " + std::string(attempt) + " after deletion." +
          (rref.member()->has_left ? " It belongs to " + nameOf(*rref.member()) + "." : ""),
      rref.owner().name);
}

Error droppedError(const RRefId& rref, const WorkerInfo& owner) {
  return Error(
      ErrorCode::kRRefDeleted,
      "RRef " + toString(rref) + " does not exist on " + owner.name +
          ", or the worker that asks for it does not hold it (any more): it has deleted its reference, was taken for "
          "lost, or has never had one.",
      owner.name);
}

Error creationError(const WorkerInfo& owner, const Error& cause) {
  if (cause.code() == ErrorCode::kQuotaExceeded) return cause;  // it says why, and the owner has created nothing
  const bool is_timeout = cause.code() == ErrorCode::kTimeout;
  const std::string text = is_timeout
      ? "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the "
        "owner node does not exist."
      : "RRef creation via rpc.remote() failed, and " + owner.name + " may not have created it.";
  const bool keeps_code = cause.code() == ErrorCode::kWorkerLost || cause.code() == ErrorCode::kShutdown;
  const auto code = is_timeout ? ErrorCode::kRRefCreationTimeout : keeps_code ? cause.code() : ErrorCode::kRRefCreation;
  return Error(code, text + " Cause: " + cause.text(), owner.name);
}

Error neverCreatedError(const RRefId& rref, const WorkerInfo& owner) {
  return Error(
      ErrorCode::kRRefCreation,
      "RRef creation failed: the rpc.remote() call that should have created " + toString(rref) + " never arrived on " +
          owner.name + ".",
      owner.name);
}

Error ownerLostError(const RRefId& rref, const WorkerInfo& owner) {
  return Error(
      ErrorCode::kWorkerLost,
      "RRef " + toString(rref) + " is lost with its owner, " + owner.name +
          (isRestorable(rref) ? ". Its creator makes it again when " + owner.name + " has been started again."
                              : ". It stays so if " + owner.name + " is started again: make a new one."),
      owner.name);
}

}  // namespace torchrpc
