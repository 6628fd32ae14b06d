#include "autograd/pass_messages.h"

#include "device/device_map.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {

void write(const PassHeader& pass, Writer& writer) {
  writer.put(pass.context);
  writer.put(pass.pass);
  writer.put(pass.mode);
  writer.put(pass.retain_graph);
}

PassHeader readPassHeader(Reader& reader) {
  PassHeader pass;
  pass.context = reader.get<ContextId>();
  pass.pass = reader.get<PassId>();
  pass.mode = reader.get<BackwardMode>();
  if (pass.mode > BackwardMode::kSmart) {
    throw Error(ErrorCode::kProtocol, "malformed message: a backward pass of no known mode");
  }
  pass.retain_graph = reader.get<uint8_t>() != 0;
  return pass;
}

void write(const MessageGradients& gradients, Message& message) {
  Writer writer(message.payload);
  writer.put(gradients.send);
  std::vector<DeviceMove> moves;
  for (size_t i = 0; i < gradients.gradients.size(); ++i) {
    const auto& gradient = gradients.gradients[i];
    writer.put(gradient.defined());
    if (!gradient.defined()) continue;
    const auto target = i < gradients.devices.size() ? gradients.devices[i] : std::nullopt;
    if (target) moves.push_back({static_cast<uint32_t>(message.tensors.size()), gradient.device(), *target});
    message.tensors.push_back(gradient);
  }
  setDeviceMoves(message, moves);
}

/// Reads to the end of the payload.
MessageGradients readGradients(Reader& reader, const Message& message) {
  MessageGradients gradients{.send = reader.get<MessageId>()};
  size_t next = 0;
  while (reader.remaining() > 0) {
    const bool defined = reader.get<uint8_t>() != 0;
    if (defined && next == message.tensors.size()) {
      throw Error(ErrorCode::kProtocol, "malformed message: fewer gradients than it says");
    }
    gradients.gradients.push_back(defined ? message.tensors[next++] : at::Tensor());
  }
  return gradients;
}

}  // namespace

Message encode(const MarkRequest& request) {
  Message message{.kind = Kind::kAutogradMark};
  Writer writer(message.payload);
  write(request.pass, writer);
  for (const auto send : request.sends) writer.put(send);
  return message;
}

Message encode(const GradientRequest& request) {
  Message message{.kind = Kind::kAutogradGradients};
  Writer writer(message.payload);
  write(request.pass, writer);
  writer.put<uint32_t>(static_cast<uint32_t>(request.sends.size()));
  for (const auto send : request.sends) writer.put(send);
  write(request.gradients, message);
  return message;
}

Message encode(const GradientReply& reply) {
  Message message{.kind = Kind::kReply};
  if (reply.gradients) write(*reply.gradients, message);
  return message;
}

Message encode(const RRefBackwardRequest& request) {
  Message message{.kind = Kind::kRRefBackward};
  Writer writer(message.payload);
  write(request.pass, writer);
  writer.putString(request.rref);
  return message;
}

Message encode(const AbortRequest& request) {
  Message message{.kind = Kind::kAutogradAbort};
  Writer writer(message.payload);
  write(request.pass, writer);
  write(request.reason, writer);
  return message;
}

MarkRequest decodeMark(const Message& message) {
  Reader reader(message.payload);
  MarkRequest request{.pass = readPassHeader(reader)};
  while (reader.remaining() > 0) request.sends.push_back(reader.get<MessageId>());
  return request;
}

GradientRequest decodeGradients(const Message& message) {
  Reader reader(message.payload);
  GradientRequest request{.pass = readPassHeader(reader)};
  for (auto left = reader.get<uint32_t>(); left > 0; --left) request.sends.push_back(reader.get<MessageId>());
  request.gradients = readGradients(reader, message);
  return request;
}

GradientReply decodeGradientReply(const Message& message) {
  Reader reader(message.payload);
  if (reader.remaining() == 0) return {};
  return {readGradients(reader, message)};
}

AbortRequest decodeAbort(const Message& message) {
  Reader reader(message.payload);
  const auto pass = readPassHeader(reader);
  AbortRequest request{pass, readError(reader)};
  reader.expectEnd();
  return request;
}

RRefBackwardRequest decodeRRefBackward(const Message& message) {
  Reader reader(message.payload);
  RRefBackwardRequest request{.pass = readPassHeader(reader)};
  request.rref = reader.getString();
  reader.expectEnd();
  return request;
}

}  // namespace torchrpc
