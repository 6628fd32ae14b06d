#include "node/native_registry.h"

#include <unordered_map>

#include "node/node.h"
#include "node/rref_value.h"

namespace torchrpc {

namespace {

struct Registry {
  Mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<const NativeHandler>> handlers;  // guarded by mutex
};

// Static initialisers of other files register here, so it is made with the first use.
Registry& registry() {
  static Registry instance;
  return instance;
}

std::shared_ptr<const NativeHandler> find(const std::string& name) {
  auto& all = registry();
  MutexLock lock(all.mutex);
  if (const auto it = all.handlers.find(name); it != all.handlers.end()) return it->second;
  throw Error(
      ErrorCode::kNoSuchFunction,
      "no native function named " + name +
          " here: the callee's program, or a library that it has loaded, must register it too");
}

}  // namespace

void registerNativeHandler(std::string name, NativeHandler handler) {
  auto shared = std::make_shared<const NativeHandler>(std::move(handler));
  auto& all = registry();
  MutexLock lock(all.mutex);
  if (!all.handlers.emplace(name, std::move(shared)).second) {
    throw Error(ErrorCode::kInvalidArgument, "a native function named " + name + " is registered already");
  }
}

void registerNativeFunction(std::string name, NativeFunction function) {
  registerNativeHandler(
      std::move(name),
      [function = std::move(function)](
          const NativeCall&, std::vector<c10::IValue> args, const CallableRunner::ValueHandler& done) {
        done(function(std::move(args)));
      });
}

Message encodeNativeCall(
    Kind kind, const std::string& name, const std::vector<c10::IValue>& args, const RRefPlace& rrefs) {
  Message message{.kind = kind};
  Writer writer(message.payload);
  writer.putString(name);
  writer.put<uint32_t>(static_cast<uint32_t>(args.size()));
  for (const auto& value : args) encodeValue(value, writer, message.tensors, {}, rrefs);
  return message;
}

void NativeRunner::call(Invocation invocation, Responder responder) {
  // A function may finish when its node has been given up: the way back must still be there, and go first.
  auto alive = node_.weak_from_this().lock();
  const auto to = invocation.from.id;
  evaluate(std::move(invocation), [alive = std::move(alive), this, to, responder](Result<c10::IValue> result) {
    if (!result) return responder.fail(result.error());
    try {
      responder.reply(node_.replyWith(result.value(), to));
    } catch (const Error& unsendable) {
      responder.fail(unsendable);
    }
  });
}

void NativeRunner::evaluate(Invocation invocation, ValueHandler done) {
  Reader reader(invocation.message.payload);
  const std::string name(reader.getString());
  AllowList::check(node_.allowed(), "cpp_function(" + name + ")");
  const auto handler = find(name);
  const auto node = node_.weak_from_this();
  const auto rrefs = amongReceived(invocation.rrefs, node);
  std::vector<c10::IValue> args;
  for (auto count = reader.get<uint32_t>(); count > 0; --count) {
    args.push_back(decodeValue(reader, invocation.message.tensors, nullptr, {}, rrefs));
  }
  reader.expectEnd();
  (*handler)({node, invocation.from}, std::move(args), std::move(done));
}

}  // namespace torchrpc
