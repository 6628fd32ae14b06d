#include "wire/trace_context.h"

#include <algorithm>
#include <string_view>

#include "wire/codec.h"

namespace torchrpc {

namespace {

bool isLowerHex(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool isId(std::string_view text) { return isLowerHex(text) && text.find_first_not_of('0') != std::string_view::npos; }

}  // namespace

bool isValid(const TraceContext& context) {
  // 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
  const std::string_view parent = context.parent;
  const bool is_parent = parent.size() == 55 && parent.starts_with("00-") && parent[35] == '-' && parent[52] == '-' &&
      isId(parent.substr(3, 32)) && isId(parent.substr(36, 16)) && isLowerHex(parent.substr(53));
  return is_parent && context.state.size() <= kMaxTraceStateBytes &&
      std::ranges::all_of(context.state, [](char c) { return c >= ' ' && c <= '~'; });
}

std::string encode(const TraceContext& context) {
  if (!isValid(context)) throwInvalidArgument("not a W3C trace context: '" + context.parent + "'");
  std::string out;
  Writer writer(out);
  writer.putShort(context.parent);
  writer.putShort(context.state);
  return out;
}

std::optional<TraceContext> traceContextOf(const Message& message) try {
  const auto* bytes = message.header(HeaderKind::kTraceContext);
  if (!bytes) return std::nullopt;
  Reader reader(*bytes);
  TraceContext context;
  context.parent = reader.getShort();
  context.state = reader.getShort();
  return isValid(context) ? std::optional(std::move(context)) : std::nullopt;
} catch (const Error&) {
  return std::nullopt;
}

}  // namespace torchrpc
