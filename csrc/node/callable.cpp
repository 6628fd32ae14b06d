#include "node/callable.h"

#include "wire/value_codec.h"

namespace torchrpc {

Message plainReply(const c10::IValue& value) {
  if (value.isCapsule()) {
    throw Error(
        ErrorCode::kSerialization,
        "the RRef's value is an object of the C++ core, such as an optimizer, which stays with its owner");
  }
  Message reply{.kind = Kind::kReply};
  Writer writer(reply.payload);
  writer.put(ValueFormat::kPlain);
  encodeValue(value, writer, reply.tensors);
  return reply;
}

c10::IValue plainValue(const Message& reply) {
  Reader reader(reply.payload);
  if (reader.get<ValueFormat>() != ValueFormat::kPlain) {
    throw Error(
        ErrorCode::kSerialization,
        "the value is a Python object that only Python can read: return plain data (numbers, strings, tensors, lists, "
        "tuples, dicts) to C++ callers");
  }
  auto value = decodeValue(reader, reply.tensors);
  reader.expectEnd();
  return value;
}

void ValueRunner::call(Invocation invocation, Responder responder) { responder.reply(plainReply(run(invocation))); }

void ValueRunner::evaluate(Invocation invocation, ValueHandler done) { done(run(invocation)); }

}  // namespace torchrpc
