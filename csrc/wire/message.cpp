// Headers of messages, and errors as messages. frame.cpp turns messages into frames.

#include "wire/message.h"

#include "wire/codec.h"

namespace torchrpc {

const std::string* Message::header(HeaderKind kind) const {
  for (const auto& header : headers) {
    if (header.kind == kind) return &header.bytes;
  }
  return nullptr;
}

void write(const Error& error, Writer& out) {
  out.put(error.code());
  out.putString(error.text());
  out.putString(error.worker());
  out.putString(error.detail());
}

Error readError(Reader& in) {
  auto code = in.get<ErrorCode>();
  if (name(code) == name(ErrorCode::kUnknown))
    code = ErrorCode::kUnknown;  // a newer peer may send codes that are unknown here
  std::string text(in.getString());
  std::string worker(in.getString());
  std::string detail(in.getString());
  return Error(code, std::move(text), std::move(worker), std::move(detail));
}

Message encodeError(const Error& error) {
  Message message{.kind = Kind::kError};
  Writer out(message.payload);
  write(error, out);
  return message;
}

Error decodeError(const Message& message) {
  Reader in(message.payload);
  auto error = readError(in);
  in.expectEnd();
  return error;
}

}  // namespace torchrpc
