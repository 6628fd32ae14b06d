// The calls of the public API, as messages: of registered C++ functions, operators and Python functions.

#include <torch/csrc/jit/runtime/operator.h>

#include <sstream>

#include "api/access.h"
#include "api/future_state.h"
#include "wire/metadata.h"

namespace torchrpc {

namespace api {

namespace {

using Values = std::vector<c10::IValue>;

/// Splits "aten::add.Tensor" into the name and the overload; "aten::add" has no overload.
std::pair<std::string, std::optional<std::string>> operatorParts(const std::string& name) {
  const auto scope = name.find("::");
  if (scope == std::string::npos)
    throwInvalidArgument("an operator's name has the form aten::add or aten::add.Tensor, not " + name);
  const auto dot = name.find('.', scope);
  if (dot == std::string::npos) return {name, std::nullopt};
  return {name.substr(0, dot), name.substr(dot + 1)};
}

Message operatorCall(Kind kind, const std::string& full_name, const Values& args) {
  const auto [name, overload] = operatorParts(full_name);
  std::string mismatches;
  for (const auto& op : torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(name))) {
    const auto& schema = op->schema();
    if (overload && schema.overload_name() != *overload) continue;
    try {
      auto stack = args;
      schema.checkAndNormalizeInputs(stack);
      return encodeBuiltinCall(kind, schema, stack);
    } catch (const c10::Error& e) {
      mismatches += std::string("\n  ") + e.what_without_backtrace();
    }
  }
  if (mismatches.empty()) throw Error(ErrorCode::kNoSuchFunction, "there is no operator " + full_name + " here");
  throwInvalidArgument("no overload of " + full_name + " takes these arguments:" + mismatches);
}

Message pythonCall(Kind kind, const std::string& name, const Values& args, const RRefIndexOf& rrefs) {
  const auto colon = name.find(':');
  const auto split = colon == std::string::npos ? name.rfind('.') : colon;
  if (split == std::string::npos || split == 0 || split + 1 == name.size()) {
    throwInvalidArgument("a Python function's name has the form module.function or module:Class.method, not " + name);
  }
  Message message{.kind = kind};
  Writer writer(message.payload);
  writer.put(ValueFormat::kPlain);
  writer.put(false);  // it does not return a future
  writer.putString(name.substr(0, split));
  writer.putString(name.substr(split + 1));
  encodeValue(c10::ivalue::Tuple::create(args), writer, message.tensors, {}, rrefs);
  const c10::TypePtr any = c10::AnyType::get();
  encodeValue(c10::impl::GenericDict(any, any), writer, message.tensors);
  return message;
}

/// Encodes a call of a method of a Python object in the same way as Python's RRef proxies.
Message methodCall(Kind kind, const std::string& name, const Values& args, const RRefIndexOf& rrefs) {
  if (args.empty() || !args.front().isRRef()) {
    throwInvalidArgument("method(" + name + ") needs an RRef to the object: rref.call(method(...), arguments ...)");
  }
  const c10::TypePtr any = c10::AnyType::get();
  const auto positional = c10::ivalue::Tuple::create(Values(args.begin() + 1, args.end()));
  return pythonCall(
      kind, "torchrpc.rpc.rref_proxy:_call_method", {args.front(), name, positional, c10::impl::GenericDict(any, any)},
      rrefs);
}

core::Node::Outgoing encode(
    core::Node& node, const NodeRef& ref, WorkerId to, const Callable& callable, const Values& args,
    Operation operation) {
  OutgoingForks forks(node.rrefs(), to);
  core::Node::Outgoing out;
  switch (callable.kind()) {
    case Callable::Kind::kFunction:
      out.message = encodeCppCall(kindOf(operation, CallableType::kCpp), callable.name(), args, rrefWriter(forks));
      break;
    case Callable::Kind::kOperator:
      out.message = operatorCall(kindOf(operation, CallableType::kOperator), callable.name(), args);
      break;
    case Callable::Kind::kPython:
      out.message = pythonCall(kindOf(operation, CallableType::kPython), callable.name(), args, rrefWriter(forks));
      break;
    case Callable::Kind::kMethod:
      out.message = methodCall(kindOf(operation, CallableType::kPython), callable.name(), args, rrefWriter(forks));
      break;
  }
  if (ref.metadata()) setMetadata(out.message, *ref.metadata());
  out.message.repetition = repetitionOf(ref);
  out.forks = forks.commit(out.message);
  return out;
}

}  // namespace
}  // namespace api

inline namespace v1 {
namespace detail {

namespace {

std::string describe(const at::Tensor& tensor) {
  std::ostringstream text;
  text << "a tensor of the shape " << tensor.sizes() << " and the dtype " << tensor.scalar_type();
  return text.str();
}

}  // namespace

void throwNoRank(const std::string& number) {
  throwInvalidArgument("a worker's rank is a number from 0 to world size - 1, but got " + number);
}

FutureStatePtr startCall(
    const NodeRef& ref, const Destination& to, const Callable& callable, const std::vector<c10::IValue>& args) {
  const auto node = api::coreOf(ref);
  return api::concerning(node->self().name, [&] {
    node->agent().requireCallsAllowed();
    const auto worker = api::resolve(*node, to);
    auto call = api::encode(*node, ref, worker.id, callable, args, Operation::kCall);
    auto state = std::make_shared<FutureState>(node);
    auto& thread = ThreadRecord::ofThisThread();
    thread.setLastCall(0);
    node->call(worker.id, std::move(call), api::timeoutOf(ref, *node), settleWithReply(state));
    state->setCall(worker.id, thread.lastCall());
    return state;
  });
}

c10::IValue startRemote(
    const NodeRef& ref, const Destination& to, const Callable& callable, const std::vector<c10::IValue>& args) {
  const auto node = api::coreOf(ref);
  return api::concerning(node->self().name, [&] {
    if (ref.retries()) {
      throwInvalidArgument(
          "remote() cannot have retries, because an RRef is lost with the connection on which it was made: repeat it "
          "yourself, with a key");
    }
    node->agent().requireCallsAllowed();
    const auto worker = api::resolve(*node, to);
    auto call = api::encode(*node, ref, worker.id, callable, args, Operation::kRemote);
    return RRefValue::wrap(node->rrefs().remote(worker, std::move(call.message), api::timeoutOf(ref, *node)), node);
  });
}

const at::Tensor& checkedOut(const at::Tensor& out) {
  if (out.defined()) return out;
  throwInvalidArgument("the tensor that callInto() is to write is undefined: make one of the result's shape and dtype");
}

void copyResult(const at::Tensor& out, const c10::IValue& result) {
  const bool is_tensor = result.isTensor() && result.toTensor().defined();
  if (!is_tensor || result.toTensor().sizes() != out.sizes() || result.toTensor().scalar_type() != out.scalar_type()) {
    throw Error(
        ErrorCode::kResultMismatch,
        "the result of the call: callInto() expected " + describe(out) + ", but got " +
            (is_tensor ? describe(result.toTensor()) : "a value of the type " + result.type()->str()));
  }
  const at::NoGradGuard no_grad;
  out.copy_(result.toTensor());
}

c10::IValue makeRRef(const NodeRef& ref, c10::IValue value) {
  const auto node = api::coreOf(ref);
  auto rref = node->rrefs().createOwner();
  rref->setValue(std::move(value));
  return RRefValue::wrap(std::move(rref), node);
}

}  // namespace detail
}  // namespace v1
}  // namespace torchrpc
