#include "node/native_registry.h"

#include "wire/value_codec.h"

namespace torchrpc {

namespace {

struct Registry {
  Mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<const NativeFunction>> functions;  // guarded by mutex
};

// Static initialisers of other files register here, so it is made with the first use.
Registry& registry() {
  static Registry instance;
  return instance;
}

}  // namespace

void registerNativeFunction(std::string name, NativeFunction function) {
  auto shared = std::make_shared<const NativeFunction>(std::move(function));
  auto& all = registry();
  MutexLock lock(all.mutex);
  if (!all.functions.emplace(name, std::move(shared)).second) {
    throw Error(ErrorCode::kInvalidArgument, "a native function named " + name + " is registered already");
  }
}

Message encodeNativeCall(Kind kind, const std::string& name, const std::vector<c10::IValue>& args) {
  Message message{.kind = kind};
  Writer writer(message.payload);
  writer.putString(name);
  writer.put<uint32_t>(static_cast<uint32_t>(args.size()));
  for (const auto& value : args) encodeValue(value, writer, message.tensors);
  return message;
}

c10::IValue NativeRunner::run(const Invocation& invocation) {
  Reader reader(invocation.message.payload);
  const std::string name(reader.getString());
  std::shared_ptr<const NativeFunction> function;
  {
    auto& all = registry();
    MutexLock lock(all.mutex);
    if (auto it = all.functions.find(name); it != all.functions.end()) function = it->second;
  }
  if (!function) {
    throw Error(
        ErrorCode::kNoSuchFunction,
        "no native function named " + name + " here: register it (registerNativeFunction) on the callee too");
  }
  std::vector<c10::IValue> args;
  for (auto count = reader.get<uint32_t>(); count > 0; --count) {
    args.push_back(decodeValue(reader, invocation.message.tensors));
  }
  reader.expectEnd();
  return (*function)(std::move(args));
}

}  // namespace torchrpc
