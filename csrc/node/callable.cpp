#include "node/callable.h"

#include "wire/value_forms.h"

namespace torchrpc {

Message plainReply(const c10::IValue& value, const RRefIndexOf& rrefs) {
  if (value.isCapsule() && !formOf(value)) {
    throw Error(
        ErrorCode::kSerialization,
        "the value is a C++ object, which stays where it is: pass an RRef to it to functions that run there");
  }
  Message reply{.kind = Kind::kReply};
  Writer writer(reply.payload);
  writer.put(ValueFormat::kPlain);
  encodeValue(value, writer, reply.tensors, {}, rrefs);
  return reply;
}

c10::IValue plainValue(const Message& reply, const RRefAt& rrefs) {
  Reader reader(reply.payload);
  if (reader.remaining() == 0) return {};
  if (reader.get<ValueFormat>() != ValueFormat::kPlain) {
    throw Error(
        ErrorCode::kSerialization,
        "the value is a Python object that only Python can read: return plain data (numbers, strings, tensors, lists, "
        "tuples, dicts) to C++ callers");
  }
  auto value = decodeValue(reader, reply.tensors, nullptr, {}, rrefs);
  reader.expectEnd();
  return value;
}

}  // namespace torchrpc
