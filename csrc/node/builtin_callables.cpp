#include "node/builtin_callables.h"

#include <torch/csrc/jit/runtime/operator.h>

#include "wire/value_codec.h"

namespace torchrpc {

namespace {
constexpr size_t kUsualPayloadBytes = 128;
}

Message encodeBuiltinCall(Kind kind, const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  Message message{.kind = kind};
  message.payload.reserve(kUsualPayloadBytes);
  message.tensors.reserve(stack.size());
  Writer writer(message.payload);
  writer.putString(schema.name());
  writer.putString(schema.overload_name());
  writer.put<uint32_t>(static_cast<uint32_t>(stack.size()));
  for (const auto& value : stack) encodeValue(value, writer, message.tensors);
  return message;
}

std::shared_ptr<torch::jit::Operator> BuiltinRunner::find(const std::string& name, const std::string& overload) {
  const auto key = name + "." + overload;
  {
    MutexLock lock(mutex_);
    if (auto it = operators_.find(key); it != operators_.end()) return it->second;
  }
  for (const auto& op : torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(name))) {
    if (op->schema().overload_name() == overload) {
      MutexLock lock(mutex_);
      return operators_.emplace(key, op).first->second;
    }
  }
  throw Error(
      ErrorCode::kNoSuchFunction,
      "no operator " + name + (overload.empty() ? "" : "." + overload) +
          " here: the callee needs the same torch version and operator libraries as the caller");
}

c10::IValue BuiltinRunner::run(const Invocation& invocation) {
  Reader reader(invocation.message.payload);
  const std::string name(reader.getString());
  const std::string overload(reader.getString());
  if (name.find("::") == std::string::npos) throw Error(ErrorCode::kProtocol, "malformed message: no operator's name");
  AllowList::check(allowed_.of(invocation.from.name), name);
  const auto op = find(name, overload);
  const auto& arguments = op->schema().arguments();
  if (const auto count = reader.get<uint32_t>(); count != arguments.size()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        name + " takes " + std::to_string(arguments.size()) + " arguments, the call has " + std::to_string(count));
  }
  torch::jit::Stack stack;
  stack.reserve(arguments.size());
  for (const auto& argument : arguments) {
    try {
      // Not argument.type(), in which a dtype, a layout and a memory format are ints.
      stack.push_back(decodeValue(reader, invocation.message.tensors, argument.real_type()));
    } catch (const Error& error) {
      throw Error(error.code(), "argument '" + argument.name() + "' of " + name + ": " + error.text(), error.worker());
    }
  }
  reader.expectEnd();
  op->getOperation()(stack);
  if (stack.empty()) return {};
  return stack.size() == 1 ? std::move(stack.front()) : c10::ivalue::Tuple::create(std::move(stack));
}

}  // namespace torchrpc
