#include "optim/optim_messages.h"

#include "wire/value_codec.h"

namespace torchrpc {

namespace {

using c10::IValue;

IValue toValue(const Options& options) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [name, value] : options) dict.insert(name, value);
  return dict;
}

IValue toValue(const std::vector<Options>& options) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const auto& group : options) list.push_back(toValue(group));
  return list;
}

IValue toValue(const std::vector<ParamState>& states) {
  c10::List<c10::Dict<std::string, at::Tensor>> list;
  for (const auto& state : states) {
    c10::Dict<std::string, at::Tensor> dict;
    for (const auto& [name, tensor] : state) dict.insert(name, tensor);
    list.push_back(dict);
  }
  return list;
}

[[noreturn]] void malformed(const char* what) {
  throw Error(ErrorCode::kProtocol, std::string("malformed message about an optimizer: ") + what);
}

Options toOptions(const IValue& value) {
  if (!value.isGenericDict()) malformed("options are not a dict");
  Options options;
  for (const auto& entry : value.toGenericDict()) {
    if (!entry.key().isString()) malformed("an option's name is not a string");
    options.emplace(entry.key().toStringRef(), entry.value());
  }
  return options;
}

std::vector<ParamState> readStates(Reader& reader, const Message& message) {
  const static auto type = c10::ListType::create(c10::DictType::create(c10::StringType::get(), c10::TensorType::get()));
  const auto value = decodeValue(reader, message.tensors, type);
  reader.expectEnd();
  std::vector<ParamState> states;
  for (const auto& state : value.toListRef()) {
    auto& out = states.emplace_back();
    for (const auto& entry : state.toGenericDict()) out.emplace(entry.key().toStringRef(), entry.value().toTensor());
  }
  return states;
}

}  // namespace

Message encode(const OptimCreate& request) {
  Message message{.kind = Kind::kOptimCreate};
  Writer writer(message.payload);
  writer.putString(request.kind);
  writer.put(request.lock_free);
  writer.put<uint32_t>(static_cast<uint32_t>(request.groups.size()));
  for (const auto& group : request.groups) {
    writer.put<uint64_t>(group.params);
    encodeValue(toValue(group.options), writer, message.tensors);
  }
  return message;
}

OptimCreate decodeOptimCreate(const Message& message) {
  Reader reader(message.payload);
  OptimCreate request;
  request.kind = reader.getString();
  request.lock_free = reader.get<uint8_t>() != 0;
  for (auto count = reader.get<uint32_t>(); count > 0; --count) {
    auto& group = request.groups.emplace_back();
    group.params = reader.get<uint64_t>();
    group.options = toOptions(decodeValue(reader, message.tensors));
  }
  reader.expectEnd();
  return request;
}

Message encode(const OptimStep& request) {
  Message message{.kind = Kind::kOptimStep};
  Writer writer(message.payload);
  writer.putString(request.optimizer);
  writer.put(request.context);
  writer.put(request.revision);
  encodeValue(toValue(request.options), writer, message.tensors);
  return message;
}

OptimStep decodeOptimStep(const Message& message) {
  Reader reader(message.payload);
  OptimStep request;
  request.optimizer = reader.getString();
  request.context = reader.get<int64_t>();
  request.revision = reader.get<uint64_t>();
  const auto options = decodeValue(reader, message.tensors);
  reader.expectEnd();
  if (!options.isList()) malformed("the options of the groups are not a list");
  for (const auto& group : options.toListRef()) request.options.push_back(toOptions(group));
  return request;
}

Message encodeOptimState(const std::string& optimizer) {
  Message message{.kind = Kind::kOptimState};
  Writer(message.payload).putString(optimizer);
  return message;
}

Message encodeOptimLoad(const std::string& optimizer, const std::vector<ParamState>& states) {
  Message message{.kind = Kind::kOptimLoad};
  Writer writer(message.payload);
  writer.putString(optimizer);
  encodeValue(toValue(states), writer, message.tensors);
  return message;
}

std::string decodeOptimTarget(const Message& message) { return std::string(Reader(message.payload).getString()); }

std::vector<ParamState> decodeOptimLoad(const Message& message) {
  Reader reader(message.payload);
  reader.getString();
  return readStates(reader, message);
}

Message encodeStates(const std::vector<ParamState>& states) {
  Message reply{.kind = Kind::kReply};
  Writer writer(reply.payload);
  encodeValue(toValue(states), writer, reply.tensors);
  return reply;
}

std::vector<ParamState> decodeStates(const Message& reply) {
  Reader reader(reply.payload);
  return readStates(reader, reply);
}

}  // namespace torchrpc
