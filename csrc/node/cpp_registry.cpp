#include "node/cpp_registry.h"

#include <unordered_map>

#include "base/log.h"
#include "base/sync/fork_safe_mutex.h"
#include "node/node.h"
#include "node/rref_value.h"
#include "wire/metadata.h"

namespace torchrpc {

namespace {

struct Registry {
  ForkSafeMutex mutex;
  std::unordered_map<std::string, std::shared_ptr<const CppHandler>> handlers TORCHRPC_GUARDED_BY(mutex);
  std::string errors TORCHRPC_GUARDED_BY(mutex);
  bool are_checked TORCHRPC_GUARDED_BY(mutex) = false;
};

// Made on first use, because static initialisers of other files register functions.
Registry& registry() {
  static Registry instance;
  return instance;
}

std::shared_ptr<const CppHandler> find(const std::string& name) {
  auto& all = registry();
  MutexLock lock(all.mutex);
  if (const auto it = all.handlers.find(name); it != all.handlers.end()) return it->second;
  throw Error(
      ErrorCode::kNoSuchFunction,
      "no C++ function named " + name +
          " here: the callee's program, or a library that it has loaded, must register it too");
}

}  // namespace

void registerCppHandler(const std::string& name, CppHandler handler) {
  auto shared = std::make_shared<const CppHandler>(std::move(handler));
  auto& all = registry();
  MutexLock lock(all.mutex);
  if (!all.handlers.emplace(name, std::move(shared)).second) {
    throw Error(ErrorCode::kInvalidArgument, "a C++ function named " + name + " is registered already");
  }
}

bool unregisterCppFunction(const std::string& name) {
  std::shared_ptr<const CppHandler> removed;  // destroyed without the lock
  auto& all = registry();
  MutexLock lock(all.mutex);
  const auto it = all.handlers.find(name);
  if (it == all.handlers.end()) return false;
  removed = std::move(it->second);
  all.handlers.erase(it);
  return true;
}

void addRegistrationError(const std::string& text) {
  auto& all = registry();
  MutexLock lock(all.mutex);
  all.errors += (all.errors.empty() ? "" : "\n") + text;
  const bool is_late = all.are_checked;
  lock.unlock();
  if (is_late) log(LogLevel::kError, text);
}

void checkRegistrations() {
  auto& all = registry();
  MutexLock lock(all.mutex);
  all.are_checked = true;
  if (!all.errors.empty()) throw Error(ErrorCode::kInvalidArgument, all.errors);
}

void registerCppFunction(const std::string& name, CppFunction function) {
  registerCppHandler(
      name,
      [function = std::move(function)](
          const CppCall&, std::vector<c10::IValue> args, const CallableRunner::ValueHandler& done) {
        done(function(std::move(args)));
      });
}

Message encodeCppCall(
    Kind kind, const std::string& name, const std::vector<c10::IValue>& args, const RRefIndexOf& rrefs) {
  Message message{.kind = kind};
  Writer writer(message.payload);
  writer.putString(name);
  writer.put<uint32_t>(static_cast<uint32_t>(args.size()));
  for (const auto& value : args) encodeValue(value, writer, message.tensors, {}, rrefs);
  return message;
}

void CppRunner::call(Invocation&& invocation, const Responder& responder) {
  // The function may finish after its owner has dropped the node. The callback keeps the node alive, and destroys the
  // responder, which uses it, first.
  auto alive = node_.weak_from_this().lock();
  const auto to = invocation.from.id;
  evaluate(std::move(invocation), [alive = std::move(alive), this, to, responder](Result<c10::IValue> result) {
    if (!result) return responder.fail(result.error());
    try {
      responder.reply(node_.replyWith(result.value(), to));
    } catch (const Error& unsendable) {
      responder.fail(unsendable.withOrigin(ErrorOrigin::kResult));
    }
  });
}

void CppRunner::evaluate(Invocation&& invocation, ValueHandler done) {
  Reader reader(invocation.message.payload);
  const std::string name(reader.getString());
  AllowList::check(node_.allowed().of(invocation.from.name), "cpp_function(" + name + ")");
  const auto handler = find(name);
  const auto node = node_.weak_from_this();
  const auto rrefs = rrefReader(invocation.rrefs, node);
  std::vector<c10::IValue> args;
  for (auto count = reader.get<uint32_t>(); count > 0; --count) {
    args.push_back(decodeValue(reader, invocation.message.tensors, nullptr, {}, rrefs));
  }
  reader.expectEnd();
  CppCall context{.node = node, .from = invocation.from, .id = invocation.id};
  if (auto metadata = metadataOf(invocation.message); !metadata.empty()) {
    context.metadata = std::make_shared<const Metadata>(std::move(metadata));
  }
  (*handler)(context, std::move(args), std::move(done));
}

}  // namespace torchrpc
