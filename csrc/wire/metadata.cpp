#include "wire/metadata.h"

#include <utility>

#include "wire/codec.h"
#include "wire/trace_context.h"

namespace torchrpc {

namespace {

const std::string kTraceParent = "traceparent", kTraceState = "tracestate";

/// Returns null if the metadata is within the limits, otherwise what is wrong.
const char* misfitOf(const std::string& name, size_t count, size_t bytes) {
  if (name.empty()) return "a name is empty";
  if (name.size() > kMaxMetadataNameBytes) return "a name has more than 256 bytes";
  if (count > kMaxMetadata) return "there are more than 128 texts";
  if (bytes > kMaxMetadataBytes) return "the names and texts have more than 16 KiB";
  return nullptr;
}

void eraseHeader(Message& message, HeaderKind kind) {
  std::erase_if(message.headers, [kind](const Header& header) { return header.kind == kind; });
}

}  // namespace

void setMetadata(Message& message, const Metadata& metadata) {
  auto texts = metadata;
  const TraceContext trace{
      texts.contains(kTraceParent) ? texts.extract(kTraceParent).mapped() : "",
      texts.contains(kTraceState) ? texts.extract(kTraceState).mapped() : ""};
  if (trace.parent.empty() && trace.state.empty()) {
    eraseHeader(message, HeaderKind::kTraceContext);
  } else {
    message.setHeader(HeaderKind::kTraceContext, encode(trace));
  }
  if (texts.empty()) return eraseHeader(message, HeaderKind::kMetadata);
  std::string out;
  Writer writer(out);
  writer.put(static_cast<uint32_t>(texts.size()));
  size_t bytes = 0;
  for (const auto& [name, text] : texts) {
    bytes += name.size() + text.size();
    if (const auto* const misfit = misfitOf(name, texts.size(), bytes)) {
      throwInvalidArgument(std::string("the metadata of a call cannot be sent: ") + misfit);
    }
    writer.putString(name);
    writer.putString(text);
  }
  message.setHeader(HeaderKind::kMetadata, std::move(out));
}

Metadata metadataOf(const Message& message) {
  Metadata metadata;
  if (const auto* const header = message.header(HeaderKind::kMetadata)) {
    Reader reader(*header);
    const auto count = reader.get<uint32_t>();
    size_t bytes = 0;
    for (uint32_t i = 0; i < count; ++i) {
      std::string name(reader.getString());
      std::string text(reader.getString());
      bytes += name.size() + text.size();
      if (const auto* const misfit = misfitOf(name, count, bytes)) {
        throw Error(ErrorCode::kProtocol, std::string("malformed metadata: ") + misfit);
      }
      if (!metadata.emplace(std::move(name), std::move(text)).second) {
        throw Error(ErrorCode::kProtocol, "malformed metadata: a name is there twice");
      }
    }
    reader.expectEnd();
  }
  if (auto trace = traceContextOf(message)) {
    metadata[kTraceParent] = std::move(trace->parent);
    if (!trace->state.empty()) metadata[kTraceState] = std::move(trace->state);
  }
  return metadata;
}

}  // namespace torchrpc
