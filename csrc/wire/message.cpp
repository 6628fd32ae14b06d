// Headers of messages, and errors as messages. frame.cpp converts messages to frames.

#include "wire/message.h"

#include <algorithm>

#include "wire/codec.h"

namespace torchrpc {

const std::string* Message::header(HeaderKind kind) const {
  for (const auto& header : headers) {
    if (header.kind == kind) return &header.bytes;
  }
  return nullptr;
}

void Message::setHeader(HeaderKind kind, std::string bytes) {
  const auto found = std::ranges::find(headers, kind, &Header::kind);
  if (found != headers.end()) {
    found->bytes = std::move(bytes);
  } else {
    headers.push_back({kind, std::move(bytes)});
  }
}

size_t Message::tensorBytes() const {
  size_t bytes = 0;
  for (const auto& tensor : tensors) {
    if (tensor.defined() && tensor.has_storage()) bytes += tensor.nbytes();
  }
  return bytes;
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
  if (error.origin() != usualOrigin(error.code())) {
    std::string origin;
    Writer(origin).put(error.origin());
    message.headers.push_back({HeaderKind::kErrorOrigin, std::move(origin)});
  }
  if (const auto& type = error.exceptionType(); !type.empty()) {
    message.headers.push_back({HeaderKind::kExceptionType, type});
  }
  return message;
}

Error decodeError(const Message& message) {
  Reader in(message.payload);
  auto error = readError(in);
  in.expectEnd();
  if (const auto* type = message.header(HeaderKind::kExceptionType)) error = error.withExceptionType(*type);
  const auto* header = message.header(HeaderKind::kErrorOrigin);
  if (!header) return error;
  const auto origin = Reader(*header).get<ErrorOrigin>();
  const bool is_known = origin >= ErrorOrigin::kHere && origin <= ErrorOrigin::kResult;
  return is_known ? error.withOrigin(origin) : error;
}

}  // namespace torchrpc
